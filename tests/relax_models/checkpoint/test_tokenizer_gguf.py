"""The tokenizers that GGUF metadata describes, on vocabularies small enough to read."""

import json
import logging
import string
import unicodedata
from itertools import pairwise
from typing import Any

import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from everycast.relax_models.checkpoint.tokenizer_gguf import tokenizer_from_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
BYTES = sorted(ByteLevel.alphabet())


def bpe_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary: all bytes, `he`, `llo`, ` w`, numbers, three special tokens."""
    merges = ["h e", "l l", "ll o", "he llo", "\u0120 w", "1 2", "12 3"]
    words = [line.replace(" ", "") for line in merges]
    special = ["<|endoftext|>", "<|im_end|>", "<tool>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": BYTES + words + special,
        "tokenizer.ggml.token_type": [NORMAL] * (len(BYTES) + len(words))
        + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(BYTES) + len(words),
        "tokenizer.ggml.eos_token_id": len(BYTES) + len(words),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


def spm_metadata(pieces: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, all bytes, then `pieces` with scores."""
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + list(pieces),
        "tokenizer.ggml.scores": [0.0] * len(head) + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * len(pieces),
    }
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


def tokens(metadata: dict[str, Any], text: str, *, special: bool = False) -> list[str]:
    source = tokenizer_from_gguf(metadata, where="tiny.gguf")
    found: list[str] = source.tokenizer.encode(text, add_special_tokens=special).tokens
    return found


def test_merges_apply_in_order_and_specials_come_first() -> None:
    text = "hello world<|im_end|>he<tool>"
    assert tokens(bpe_metadata(), text) == [
        *("hello", "\u0120w", "o", "r", "l", "d"),
        *("<|im_end|>", "he", "<tool>"),
    ]
    added = tokenizer_from_gguf(bpe_metadata(), where="x").tokenizer.get_added_tokens_decoder()
    assert {t.content: t.special for t in added.values()} == {
        "<|endoftext|>": True,
        "<|im_end|>": True,
        "<tool>": False,
    }


# What each rule makes of one text, worked out by hand from its expressions.
CUTS = {
    "gpt-2": ["I", "'m", " here", ",", " 1234", "!\n"[:1], "\n\n"],
    "smollm": ["I", "'m", " here", ",", " ", "1", "2", "3", "4", "!", "\n\n"],
    "llama-bpe": ["I", "'m", " here", ",", " ", "123", "4", "!\n\n"],
    "qwen2": ["I", "'m", " here", ",", " ", "1", "2", "3", "4", "!\n\n"],
    "falcon": ["I", "'", "m", " here", ",", " 1234"[:1], "123", "4", "!", "\n\n"],
    "default": ["I", "'", "m", " here", ",", " ", "123", "4", "!", "\n\n"],
    "deepseek-llm": ["I", "'", "m", " here", ",", " ", "1234", "!", "\n", "\n"],
    "deepseek-coder": ["I", "'", "m", " here", ",", " ", "1", "2", "3", "4", "!", "\n", "\n"],
    "gpt-4o": ["I'm", " here", ",", " ", "123", "4", "!\n\n"],
    "tekken": ["I", "'m", " here", ",", " ", "1", "2", "3", "4", "!\n\n"],
    "deepseek-v3": ["I", "'m", " here", ",", " ", "123", "4", "!\n\n"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_cuts(pre: str) -> None:
    source = tokenizer_from_gguf(bpe_metadata(pre), where="tiny.gguf")
    text = "I'm here, 1234!\n\n"
    pieces = source.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == CUTS[pre]


@settings(max_examples=25, deadline=None)
@given(text=st.text())
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_rule_keeps_every_byte(pre: str, text: str) -> None:
    tokenizer = _TOKENIZERS.setdefault(
        pre, tokenizer_from_gguf(bpe_metadata(pre), where="tiny.gguf").tokenizer
    )
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


_TOKENIZERS: dict[str, Any] = {}


def test_ignore_merges_takes_a_whole_piece() -> None:
    # `world` is a token that no merge leads to.
    metadata = bpe_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "world"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    assert tokens(metadata, "world") == ["world"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert tokens(metadata, "world") == list("world")


def test_missing_rule_is_default_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        without = tokens(bpe_metadata(pre=None), "0012")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "tokenizer.ggml.pre" in caplog.text
    assert without == tokens(bpe_metadata("default"), "0012")
    assert without != tokens(bpe_metadata("gpt-2"), "0012")


def test_unknown_merge_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "w o"]
    assert tokens(metadata, "wo") == ["w", "o"]
    assert "1 of 8 merges" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pre": "other-pre"}, "tokenizer.ggml.pre is 'other-pre'"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] is 'ab'"),
        ({"token_type": [NORMAL]}, "tokenizer.ggml.token_type has 1 entries for 266 tokens"),
        ({"eos_token_id": 266}, "tokenizer.ggml.eos_token_id is 266"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_damage_is_named_by_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf.*{said}") as caught:
        tokenizer_from_gguf(bpe_metadata(**change), where="tiny.gguf")
    assert "\n" not in str(caught.value)


def test_bos_wanted_but_not_named() -> None:
    metadata = bpe_metadata(add_bos_token=True)
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.bos_token_id is missing"):
        tokenizer_from_gguf(metadata, where="tiny.gguf")


def test_duplicate_token() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][3] = metadata["tokenizer.ggml.tokens"][1]
    with pytest.raises(CheckpointError, match=r"occurs twice, as ids 1 and 3"):
        tokenizer_from_gguf(metadata, where="tiny.gguf")


def test_empty_token_does_not_match_everywhere() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = ""
    assert tokens(metadata, "he") == ["he"]


def test_end_tokens() -> None:
    """The declared end, then those known by name; a plain `</s>` is a word like any other."""
    source = tokenizer_from_gguf(bpe_metadata(), where="x")
    assert source.eos_token_ids == (len(BYTES) + 7, len(BYTES) + 8)
    assert source.config["eos_token"] == "<|endoftext|>"
    assert source.config["unk_token"] is None
    eot = tokenizer_from_gguf(bpe_metadata(eot_token_id=5), where="x")
    assert eot.eos_token_ids == (len(BYTES) + 7, 5, len(BYTES) + 8)
    gemma_like = spm_metadata({"</s>x": 0.0, "<eos>": 0.0}, eos_token_id=260)
    assert tokenizer_from_gguf(gemma_like, where="x").eos_token_ids == (260,)


def test_end_token_of_harmony_models() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][-2:] = ["<|return|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"][-2:] = [CONTROL, CONTROL]
    ends = tokenizer_from_gguf(metadata, where="x").eos_token_ids
    assert ends == (len(BYTES) + 7, len(BYTES) + 8)


def test_bos_and_eos_are_added_as_declared() -> None:
    assert tokens(bpe_metadata(), "he", special=True) == ["he"]
    assert tokens(bpe_metadata("llama-bpe"), "he", special=True) == ["<|endoftext|>", "he"]
    assert tokens(bpe_metadata("llama-bpe", add_bos_token=False), "he", special=True) == ["he"]
    both = bpe_metadata(add_bos_token=True, add_eos_token=True)
    assert tokens(both, "he", special=True) == ["<|endoftext|>", "he", "<|endoftext|>"]


def test_chat_templates() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.chat_template"] = "usual"
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    source = tokenizer_from_gguf(metadata, where="x")
    assert source.chat_templates == {"default": "usual", "tool_use": "with tools"}


def test_sentencepiece_space_prefix_and_byte_fallback() -> None:
    pieces = {SPACE: -9.0, "a": -8.0, "b": -7.0, "ab": -1.0, f"{SPACE}ab": -2.0}
    with_prefix = spm_metadata(pieces)
    assert tokens(with_prefix, "ab ab") == [f"{SPACE}ab", f"{SPACE}ab"]
    assert tokens(with_prefix, "ab</s>ab") == [f"{SPACE}ab", "</s>", f"{SPACE}ab"]
    assert tokens(with_prefix, "a\u00e9") == [SPACE, "a", "<0xC3>", "<0xA9>"]
    assert tokens(spm_metadata(pieces, add_space_prefix=False), "ab ab") == ["ab", f"{SPACE}ab"]
    assert tokens(with_prefix, "ab", special=True) == ["<s>", f"{SPACE}ab"]
    tokenizer = tokenizer_from_gguf(with_prefix, where="x").tokenizer
    for text in ("ab ab", "  a\n", "\u00e9\U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_never_makes_a_control_token_out_of_pieces() -> None:
    pieces = {"<": -1.0, "s": -2.0, ">": -3.0, "<s": -4.0, "e": -5.0, "<0": -6.0}
    metadata = spm_metadata(pieces, add_space_prefix=False)
    tokenizer = tokenizer_from_gguf(metadata, where="x").tokenizer
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>", add_special_tokens=False).tokens == ["<s", ">"]


def best_pair_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm in its plainest form."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.sets(st.integers(2, 16)).flatmap(lambda found: st.permutations(sorted(found))),
    num_spaces=st.integers(0, 60),
)
def test_sentencepiece_runs_of_spaces_that_share_a_score(
    lengths: list[int], num_spaces: int
) -> None:
    pieces = {SPACE * n: -1e9 for n in lengths} | {SPACE: -5.0}
    cut = tokens(spm_metadata(pieces, add_space_prefix=False), " " * num_spaces)
    assert cut == best_pair_first(SPACE * num_spaces, pieces)


# Letters in a fixed order without repetition, so that no two ways to one token overlap.
_WORDS = [string.ascii_lowercase[a:b] for a in range(6) for b in range(a + 2, 7)]


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(_WORDS),
    kept=st.sets(st.sampled_from(_WORDS)),
    texts=st.lists(st.lists(st.sampled_from(_WORDS)).map("".join), min_size=5, max_size=5),
)
def test_sentencepiece_merges_the_best_score_first(
    order: list[str], kept: set[str], texts: list[str]
) -> None:
    pieces = {letter: -100.0 for letter in "abcdef"}
    pieces |= {word: -float(rank) for rank, word in enumerate(order) if word in kept}
    metadata = spm_metadata(pieces, add_space_prefix=False)
    tokenizer = tokenizer_from_gguf(metadata, where="x").tokenizer
    for text in texts:
        expected = best_pair_first(text, pieces)
        assert tokenizer.encode(text, add_special_tokens=False).tokens == expected


def test_written_form_is_read_back_alike() -> None:
    """Everything that matters is inside tokenizer.json."""
    from tokenizers import Tokenizer

    for metadata in (bpe_metadata("deepseek-llm"), spm_metadata({SPACE: -1.0, "a": -2.0})):
        tokenizer = tokenizer_from_gguf(metadata, where="x").tokenizer
        again = Tokenizer.from_str(tokenizer.to_str())
        text = "a \u03b1\u4e2d 12<|im_end|></s>"
        assert again.encode(text).ids == tokenizer.encode(text).ids
        assert json.loads(again.to_str()) == json.loads(tokenizer.to_str())
