import pytest
from everycast.engine.detokenizer import Detokenizer
from everycast.engine.tokenizer import Tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

IDS = st.lists(st.integers(0, 370), max_size=40)


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One single-byte token for each byte."""
    table = {tokenizer.id_to_bytes(i): i for i in reversed(range(tokenizer.size))}
    return [table[bytes([byte])] for byte in data]


def stream(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, at_start=at_start)
    return [detokenizer.push(i) for i in ids]


def has_open_end(text: str, full: str) -> bool:
    """Whether `full` is `text` and one half character."""
    return full == text + "\ufffd"


def ends_in_half_a_surrogate(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """No character begins with these two bytes, but Python's decoder waits for the third."""
    data = b"".join(map(tokenizer.id_to_bytes, ids))
    return data[-2:-1] == b"\xed" and 0xA0 <= data[-1] <= 0xBF


@given(ids=IDS)
def test_deltas_are_the_full_text_byte_level(
    byte_level: Tokenizer, byte_level_hf: HFTokenizer, ids: list[int]
) -> None:
    text = "".join(stream(byte_level, ids))
    full = byte_level_hf.decode(ids)
    assert text == full or has_open_end(text, full)
    assert byte_level.decode(ids) == full


@given(ids=IDS)
@example(ids=[240, 163])  # ED A0, half of a surrogate
@example(ids=[240, 195])  # ED C0, which nothing begins with
@example(ids=[370, 353])  # no token, and one that begins with a space
def test_deltas_are_the_full_text_sentencepiece(
    sentencepiece: Tokenizer, sentencepiece_hf: HFTokenizer, ids: list[int]
) -> None:
    text = "".join(stream(sentencepiece, ids))
    full = sentencepiece.decode(ids)
    if ends_in_half_a_surrogate(sentencepiece, ids):
        assert full == text + "\ufffd\ufffd"
    else:
        assert text == full or has_open_end(text, full)
    # The library spoils the valid characters in a run of byte tokens when one byte is wrong.
    if "\ufffd" not in (library := sentencepiece_hf.decode(ids)):
        assert full == library


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back_from_sentencepiece(sentencepiece: Tokenizer, text: str) -> None:
    text = text.replace("▁", "").replace("<", "")
    ids = sentencepiece.encode(text)
    assert "".join(stream(sentencepiece, ids)) == text


def test_metaspace_decoder(sentencepiece_hf: HFTokenizer) -> None:
    library = HFTokenizer.from_str(sentencepiece_hf.to_str())
    for scheme in ("always", "never"):
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = Tokenizer(library.to_str())
        for ids in ([260, 290, 265], [261, 261, 300, 270]):
            assert "".join(stream(tokenizer, ids)) == library.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_no_half_characters(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "😀漢字🎉🚀é"
    deltas = stream(tokenizer, ids_of_bytes(tokenizer, text.encode()), at_start=False)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)


def test_an_unfinished_character_is_never_shown(byte_level: Tokenizer) -> None:
    assert stream(byte_level, ids_of_bytes(byte_level, "a😀".encode()[:-1])) == ["a", "", "", ""]


def test_bytes_that_are_no_character_are_replaced_once(byte_level: Tokenizer) -> None:
    assert (
        "".join(stream(byte_level, ids_of_bytes(byte_level, b"\xf0\x9fA\xff"))) == "\ufffdA\ufffd"
    )


def test_a_real_replacement_character_is_kept(byte_level: Tokenizer) -> None:
    (token_id,) = byte_level.encode(" \ufffd")
    ids = [*byte_level.encode("a"), token_id, token_id, *byte_level.encode("b")]
    assert stream(byte_level, ids) == ["a", " \ufffd", " \ufffd", "b"]


def test_leading_space_belongs_to_the_place(sentencepiece: Tokenizer) -> None:
    (token_id,) = sentencepiece.encode("the", add_bos=False)
    assert stream(sentencepiece, [1, token_id, token_id]) == ["", "the", " the"]
    assert stream(sentencepiece, [token_id], at_start=False) == [" the"]


def test_special_tokens_are_shown_on_request(byte_level: Tokenizer) -> None:
    end = byte_level.eos_token_id
    assert end is not None
    assert Detokenizer(byte_level).push(end) == ""
    assert Detokenizer(byte_level, skip_special=False).push(end) == "<|im_end|>"
