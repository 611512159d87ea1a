"""Tokenizer files of Hugging Face folders, and what is written for the artifact."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import CheckpointError
from everycast.relax_models.checkpoint.sentencepiece_model import read_sentencepiece
from everycast.relax_models.checkpoint.tokenizer import TokenizerInfo, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), "he", "ll", "llo"])}
MERGES = [("h", "e"), ("l", "l"), ("ll", "o")]
BOS, EOS, TURN_END = len(VOCAB), len(VOCAB) + 1, len(VOCAB) + 2


def byte_level_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(VOCAB, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|turn_end|>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty model folder whose name needs care."""
    folder = tmp_path / "\u017deljko \u6a21\u578b a'b"
    folder.mkdir()
    return folder


def put(folder: Path, **files: Any) -> None:
    """Write JSON files: `tokenizer_config={...}` becomes tokenizer_config.json."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def convert(
    folder: Path, config: dict[str, Any] | None = None, *, kind: str = "huggingface"
) -> tuple[TokenizerInfo, Tokenizer, dict[str, Any]]:
    out = folder.parent / "\u51fa out"
    out.mkdir(exist_ok=True)
    checkpoint: Any = SimpleNamespace(kind=kind, path=folder, config=config or {})
    info = write_tokenizer(checkpoint, out)
    assert all((out / name).exists() for name in info.files)
    written = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    return info, Tokenizer.from_file(str(out / "tokenizer.json")), written


def failure(folder: Path, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(folder, config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tokenizer_json_is_kept(source: Path) -> None:
    original = byte_level_tokenizer(adds_bos=True)
    original.save(str(source / "tokenizer.json"))
    put(
        source,
        tokenizer_config={
            "tokenizer_class": "LlamaTokenizerFast",
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "model_max_length": 64,
            "chat_template": "inside",
        },
        generation_config={"eos_token_id": [TURN_END, EOS]},
    )
    info, tokenizer, config = convert(source, {"eos_token_id": EOS, "pad_token_id": 5})
    assert json.loads(tokenizer.to_str()) == json.loads(original.to_str())
    assert info == TokenizerInfo(
        vocab_size=TURN_END + 1,
        bos_token_id=BOS,
        eos_token_ids=(TURN_END, EOS),
        pad_token_id=5,
        add_bos_token=True,
        has_chat_template=True,
    )
    assert config["bos_token"] == "<s>"
    assert config["add_bos_token"] is True
    assert config["chat_template"] == "inside"
    assert config["model_max_length"] == 64
    assert config["added_tokens_decoder"][str(TURN_END)]["content"] == "<|turn_end|>"
    assert config["added_tokens_decoder"][str(TURN_END)]["special"] is True


def test_end_ids_of_all_files_the_generation_config_first(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    put(source, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert convert(source)[0].eos_token_ids == (EOS,)
    put(source, generation_config={"eos_token_id": TURN_END})
    assert convert(source, {"eos_token_id": [7, EOS]})[0].eos_token_ids == (TURN_END, EOS, 7)


def test_named_tokens_given_by_id_only(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    info, _, config = convert(source, {"bos_token_id": BOS, "eos_token_id": [EOS]})
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert (info.bos_token_id, info.eos_token_ids) == (BOS, (EOS,))
    assert (info.add_bos_token, info.has_chat_template) == (False, False)


@pytest.mark.parametrize("in_json", [False, True])
@pytest.mark.parametrize("in_config", [False, True])
def test_llama_class_decides_about_bos(source: Path, in_json: bool, in_config: bool) -> None:
    """`transformers` rebuilds the rule of tokenizer.json for these classes."""
    byte_level_tokenizer(adds_bos=in_json).save(str(source / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": in_config}
    put(source, tokenizer_config={"tokenizer_class": "LlamaTokenizerFast", **settings})
    info, tokenizer, config = convert(source)
    assert tokenizer.encode("hello").tokens == ["<s>"] * in_config + ["he", "llo"]
    assert info.add_bos_token is config["add_bos_token"] is in_config


def test_other_classes_leave_bos_to_tokenizer_json(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    put(source, tokenizer_config={**settings, "add_bos_token": True})
    info, tokenizer, config = convert(source)
    assert tokenizer.encode("hello").tokens == ["he", "llo"]
    assert info.add_bos_token is config["add_bos_token"] is False


def test_bos_wanted_but_unknown(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<bos>"}
    put(source, tokenizer_config={**settings, "add_bos_token": True})
    assert "bos_token ('<bos>') is not in the vocabulary" in failure(source)


def test_chat_templates_of_all_places(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    put(source, tokenizer_config={"chat_template": named})
    assert convert(source)[2]["chat_template"] == named
    (source / "chat_template.jinja").write_text("c\u00e9", encoding="utf-8")
    assert convert(source)[2]["chat_template"][0] == {"name": "default", "template": "c\u00e9"}
    put(source, tokenizer_config={}, chat_template={"chat_template": "older"})
    assert convert(source)[2]["chat_template"] == "c\u00e9"
    (source / "chat_template.jinja").unlink()
    assert convert(source)[2]["chat_template"] == "older"


def test_added_tokens_that_only_the_config_has(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    new = {str(TURN_END + 1): {"content": "<think>", "special": False}}
    put(source, tokenizer_config={"added_tokens_decoder": new})
    put(source, added_tokens={"<pad>": TURN_END + 2, "</s>": EOS})
    info, tokenizer, _ = convert(source)
    assert info.vocab_size == TURN_END + 3
    assert tokenizer.encode("<think>he").ids == [TURN_END + 1, VOCAB["he"]]


def test_added_token_with_two_ids(source: Path) -> None:
    byte_level_tokenizer().save(str(source / "tokenizer.json"))
    put(source, added_tokens={"</s>": EOS + 5})
    assert f"'</s>' is given id {EOS + 5}, but the tokenizer has it at {EOS}" in failure(source)
    put(source, added_tokens={"<new>": EOS + 5})
    assert f"'<new>' is given id {EOS + 5}" in failure(source)


@pytest.mark.parametrize("token", ["</s>", "he"])
def test_duplicate_in_tokenizer_json(source: Path, token: str) -> None:
    data = json.loads(byte_level_tokenizer().to_str())
    data["added_tokens"].append({**data["added_tokens"][0], "content": token, "id": 400})
    put(source, tokenizer=data)
    assert f"token '{token}' occurs twice, as ids" in failure(source)


def test_vocab_and_merges(source: Path) -> None:
    put(source, vocab=VOCAB, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in MERGES), ""]
    (source / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    put(source, added_tokens={"</s>": BOS})
    info, tokenizer, _ = convert(source, {"eos_token_id": BOS})
    assert tokenizer.encode("hello 12</s>").tokens == ["he", "llo", "\u0120", "1", "2", "</s>"]
    assert info.eos_token_ids == (BOS,)
    put(source, tokenizer_config={})
    assert convert(source, {"model_type": "qwen2"})[1].normalizer is not None
    said = failure(source, {"model_type": "bert"})
    assert "tokenizer class None" in said and "tokenizer.json" in said
    (source / "merges.txt").write_text("h e\nbroken", encoding="utf-8")
    assert "merges.txt line 2 is 'broken'" in failure(source, {"model_type": "gpt2"})


def varint(number: int) -> bytes:
    out = b""
    number &= (1 << 64) - 1
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def sentencepiece(
    pieces: list[tuple[str, float, int]],
    *,
    kind: int = 2,
    bos: int = 1,
    prefix: int = 1,
    rewrites: bytes = b"",
) -> bytes:
    """A `tokenizer.model`: trainer and normalizer settings around (text, score, type) pieces."""
    data = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, type_))
        for text, score, type_ in pieces
    )
    trainer = field(3, kind) + field(41, bos) + field(42, 2)
    normalizer = field(1, b"identity") + field(3, prefix) + field(4, 0) + field(2, rewrites)
    return data + field(2, trainer) + field(3, normalizer)


PIECES = [
    *[("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)],
    *[(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)],
    *[("\u2581a", -1.0, 1), ("ab", -2.0, 1), ("[I]", 0.0, 4)],
    *[("\u2581", -3.0, 1), ("a", -4.0, 1), ("b", -5.0, 1)],
]


def test_sentencepiece(source: Path) -> None:
    (source / "tokenizer.model").write_bytes(sentencepiece(PIECES))
    info, tokenizer, config = convert(source)
    assert tokenizer.encode("ab[I]a\u00e9").tokens == [
        *("<s>", "\u2581a", "b", "[I]", "\u2581a", "<0xC3>", "<0xA9>")
    ]
    assert tokenizer.decode(tokenizer.encode("ab a\u00e9").ids) == "ab a\u00e9"
    assert (info.bos_token_id, info.eos_token_ids, info.add_bos_token) == (1, (2,), True)
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


def test_sentencepiece_prefix_rules(source: Path) -> None:
    path = source / "tokenizer.model"
    path.write_bytes(sentencepiece(PIECES))
    put(source, tokenizer_config={"legacy": False, "add_bos_token": False})
    assert convert(source)[1].encode("a[I]a").tokens == ["\u2581a", "[I]", "a"]
    path.write_bytes(sentencepiece(PIECES, prefix=0, bos=-1))
    info, tokenizer, _ = convert(source)
    assert tokenizer.encode("a[I] a").tokens == ["a", "[I]", "\u2581a"]
    assert info.bos_token_id is None


def test_sentencepiece_that_cannot_be_converted(source: Path) -> None:
    path = source / "tokenizer.model"
    path.write_bytes(sentencepiece(PIECES, kind=1))
    assert "kind unigram" in failure(source)
    path.write_bytes(sentencepiece(PIECES, rewrites=b"nfkc"))
    assert "rewrites text" in failure(source)
    path.write_bytes(sentencepiece(PIECES)[:-3])
    assert "not a readable SentencePiece model" in failure(source)
    path.write_bytes(b"")
    assert "empty" in failure(source)


@given(
    st.binary(max_size=64)
    | st.integers(0, 400).map(lambda n: sentencepiece(PIECES[:8])[:n])
)  # fmt: skip
def test_damaged_sentencepiece_is_one_error(data: bytes) -> None:
    try:
        model = read_sentencepiece(data, where="tokenizer.model")
    except CheckpointError as error:
        assert str(error).startswith("tokenizer.model is not a readable")
    else:
        assert len(model.tokens) == len(model.scores) == len(model.types) > 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("qwen.tiktoken", b"IQ== 0\nIg== 1\n"),
        ("tekken.json", b"{}"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
    ],
)
def test_only_tiktoken(source: Path, name: str, content: bytes) -> None:
    (source / name).write_bytes(content)
    said = failure(source)
    assert f"only a tiktoken vocabulary ({name})" in said and "tokenizer.json" in said


def test_no_tokenizer(source: Path) -> None:
    put(source, config={})
    assert "has no tokenizer" in failure(source)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"{", "not valid JSON"),
        (b"[]", "not an object"),
        (b"{}", "cannot be read"),
        (b"\xff\xfe{}", "tokenizer.json"),
    ],
)
def test_damaged_tokenizer_json(source: Path, content: bytes, said: str) -> None:
    (source / "tokenizer.json").write_bytes(content)
    assert said in failure(source)


def test_gguf_is_written_too(source: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*VOCAB, "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * len(VOCAB) + [3],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.eos_token_id": len(VOCAB),
        "tokenizer.chat_template": "x",
    }
    info, tokenizer, config = convert(source, metadata, kind="gguf")
    assert tokenizer.encode("hello<|im_end|>").tokens == ["he", "llo", "<|im_end|>"]
    assert (info.bos_token_id, info.eos_token_ids, info.has_chat_template) == (
        *(None, (len(VOCAB),), True),
    )
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", "x")
    assert "bos_token" not in config
