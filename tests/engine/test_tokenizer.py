from pathlib import Path

import pytest
from everycast.artifact.errors import ArtifactError, RequestError
from everycast.engine.tokenizer import Tokenizer, TokenizerConfig
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXT)
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert (
        byte_level.decode(byte_level.encode(text, parse_special=False), skip_special=False) == text
    )


@given(text=TEXT)
def test_encode_equals_the_library(
    byte_level: Tokenizer, byte_level_hf: HFTokenizer, text: str
) -> None:
    assert byte_level.encode(text) == byte_level_hf.encode(text).ids


def test_special_text_is_a_token_only_when_asked(byte_level: Tokenizer) -> None:
    end = byte_level.eos_token_id
    assert byte_level.encode("hi<|im_end|>")[-1] == end
    plain = byte_level.encode("hi<|im_end|>", parse_special=False)
    assert end not in plain
    assert byte_level.decode(plain) == "hi<|im_end|>"


def test_one_begin_token(sentencepiece: Tokenizer, sentencepiece_hf: HFTokenizer) -> None:
    bos = sentencepiece.bos_token_id
    assert bos is not None and sentencepiece.adds_bos
    assert sentencepiece.encode("hello") == sentencepiece_hf.encode("hello").ids
    assert sentencepiece.encode("<s>hello").count(bos) == 1
    assert sentencepiece.encode("<s>hello", add_bos=False).count(bos) == 1
    assert sentencepiece.encode("hello", add_bos=False).count(bos) == 0
    assert sentencepiece.encode("") == [bos]


def test_config_decides_about_the_begin_token(sentencepiece_hf: HFTokenizer) -> None:
    config = TokenizerConfig({"bos_token": "<s>"}, add_bos_token=False)
    assert Tokenizer(sentencepiece_hf.to_str(), config).encode("hello")[0] != 1


def test_size_counts_added_tokens(byte_level: Tokenizer, byte_level_hf: HFTokenizer) -> None:
    assert byte_level.size == byte_level_hf.get_vocab_size(with_added_tokens=True)
    assert byte_level.id_to_bytes(byte_level.size - 1) != b""
    assert byte_level.id_to_bytes(byte_level.size) == b""


def test_bytes_of_a_byte_token(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.id_to_bytes(3 + 0xF0) == b"\xf0"


def test_half_a_surrogate_pair_is_named(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2"):
        byte_level.encode("ab\ud83d")


def test_from_folder(tokenizer_folder: Path, byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    assert tokenizer.encode("Hello 你好") == byte_level.encode("Hello 你好")
    assert tokenizer.config.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.config.chat_templates.keys() == {"default"}
    (tokenizer_folder / "chat_template.jinja").write_text("other", encoding="utf-8")
    assert TokenizerConfig.from_folder(tokenizer_folder).chat_templates["default"] == "other"


def test_damaged_files_are_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tokenizer_folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tokenizer_folder)
    (tokenizer_folder / "tokenizer_config.json").unlink()
    (tokenizer_folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="cannot be read"):
        Tokenizer.from_folder(tokenizer_folder)


def test_a_decoder_that_cannot_be_streamed_is_named() -> None:
    library = HFTokenizer(models.WordLevel({"a": 0}, "a"))
    library.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(library.to_str())
    with pytest.raises(ArtifactError, match="WordPiece"):
        tokenizer.decode([0])
