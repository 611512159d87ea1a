"""Two small real tokenizers: byte-level BPE, and one as SentencePiece models are converted; and
engines over a scripted model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from everycast.engine.tokenizer import Tokenizer, TokenizerConfig
from scripted_engines import Parts
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as HFTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Here is the English alphabet: ABCDEFGHIJK",
    "Ein Žlutý kůň skákal přes potok, 你好世界, こんにちは, Привет мир, naïve café",
    " Alice said: hello!\n\nBob: the the the and and of of to to in in is is",
] * 4
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level() -> HFTokenizer:
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Added as plain text: one with a space, which is outside the byte alphabet, and the real
    # replacement character (case 2 of the public reports).
    tokenizer.add_tokens([AddedToken(" \ufffd", normalized=False), AddedToken("<tool call>")])
    return tokenizer


def _sentencepiece_like() -> HFTokenizer:
    trained = HFTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS[::3], trainer)
    model = json.loads(trained.to_str())["model"]
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(fixed)}
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_hf() -> HFTokenizer:
    return _byte_level()


@pytest.fixture(scope="session")
def sentencepiece_hf() -> HFTokenizer:
    return _sentencepiece_like()


@pytest.fixture(scope="session")
def byte_level(byte_level_hf: HFTokenizer) -> Tokenizer:
    """About 420 ids, no begin token, ChatML template."""
    config = TokenizerConfig({"eos_token": "<|im_end|>"}, {"default": CHATML})
    return Tokenizer(byte_level_hf.to_str(), config)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_hf: HFTokenizer) -> Tokenizer:
    """Byte fallback, a space in front of every text, and a begin token that is added."""
    config = TokenizerConfig({"bos_token": "<s>", "eos_token": "</s>"})
    return Tokenizer(sentencepiece_hf.to_str(), config)


@pytest.fixture
def parts(byte_level: Tokenizer) -> Iterator[Parts]:
    parts = Parts(byte_level)
    yield parts
    for end in parts.endings:
        end()


@pytest.fixture
def tokenizer_folder(tmp_path: Path, byte_level_hf: HFTokenizer) -> Path:
    """A folder as an artifact holds it."""
    folder = tmp_path / "Željko 模型 a'b"
    folder.mkdir()
    byte_level_hf.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": None,
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": [{"name": "default", "template": CHATML}],
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
