"""The tokenizer inside a GGUF: metadata keys `tokenizer.*` → a fast tokenizer.

Rules follow llama.cpp (`src/llama-vocab.cpp`), whose converter wrote the files.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...artifact.errors import CheckpointError
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .tokenizer_build import (
    TokenizerSource,
    TokenType,
    add_bos_and_eos,
    byte_level_bpe,
    mark_added_tokens,
    sentencepiece_bpe,
    token_ids,
)

logger = logging.getLogger(__name__)

# Tokens that end an answer by their very name, for files that name only one end token.
_END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str) -> TokenizerSource:
    """The tokenizer that the metadata describes; `where` names the file in errors.

    Raises CheckpointError naming the key that is missing, damaged or not supported.
    """
    vocabulary = _Vocabulary(metadata, where)
    kind = metadata.get("tokenizer.ggml.model")
    add_bos = False
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, where)
        vocab = token_ids(vocabulary.tokens, where=f"{where}: tokenizer.ggml.tokens")
        tokenizer = byte_level_bpe(vocab, vocabulary.merges(), pre)
        add_bos = pre.add_bos
    elif kind == "llama":
        tokenizer = sentencepiece_bpe(
            vocabulary.tokens,
            vocabulary.scores(),
            vocabulary.types,
            space_prefix="every"
            if metadata.get("tokenizer.ggml.add_space_prefix", True)
            else "none",
            where=f"{where}: tokenizer.ggml.tokens",
        )
        add_bos = True
    else:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.model is {kind!r}, which is not supported; "
            "supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    # llama.cpp's numbers for SentencePiece files that leave them out; BPE files have no usual ones.
    bos_id = vocabulary.token_id("bos", 1 if kind == "llama" else None)
    eos_id = vocabulary.token_id("eos", 2 if kind == "llama" else None)
    named = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": vocabulary.token_id("unknown", None),
        "pad_token": vocabulary.token_id("padding", None),
    }
    ends = vocabulary.end_ids(eos_id)
    special = frozenset(vocabulary.tokens[i] for i in ends)
    mark_added_tokens(tokenizer, vocabulary.tokens, vocabulary.types, special)
    config: dict[str, Any] = {
        name: None if i is None else vocabulary.tokens[i] for name, i in named.items()
    }
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _wrap(tokenizer, config, where)
    return TokenizerSource(tokenizer, config, ends, _chat_templates(metadata))


class _Vocabulary:
    """The lists of the metadata, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        tokens = self._list("tokens")
        # An empty token would match everywhere; llama.cpp gives it this name too.
        self.tokens: list[str] = [str(t) or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]
        if "tokenizer.ggml.token_type" in metadata:
            self.types = [int(t) for t in self._list("token_type", len(tokens))]
        else:
            self.types = [int(TokenType.NORMAL)] * len(tokens)

    def _list(self, name: str, length: int | None = None) -> Sequence[Any]:
        key = f"tokenizer.ggml.{name}"
        values = self._metadata.get(key)
        if values is None:
            raise CheckpointError(
                f"{self._where}: metadata key {key} is missing; the file holds no usable "
                "tokenizer, convert the model to GGUF again"
            )
        if length is not None and len(values) != length:
            raise CheckpointError(
                f"{self._where}: {key} has {len(values)} entries for {length} tokens; "
                "the file is damaged, fetch it again"
            )
        return values  # type: ignore[no-any-return]

    def merges(self) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for rank, line in enumerate(self._list("merges")):
            cut = line.find(" ", 1)
            if cut < 0:
                raise CheckpointError(
                    f"{self._where}: tokenizer.ggml.merges[{rank}] is {line!r}, not two tokens "
                    "with a space between; the file is damaged, fetch it again"
                )
            pairs.append((line[:cut], line[cut + 1 :]))
        return pairs

    def scores(self) -> list[float]:
        return [float(s) for s in self._list("scores", len(self.tokens))]

    def token_id(self, name: str, default: int | None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._metadata:
            return default if default is not None and default < len(self.tokens) else None
        token_id = int(self._metadata[key])
        if not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"{self._where}: {key} is {token_id}, but the vocabulary has "
                f"{len(self.tokens)} tokens; the file is damaged, fetch it again"
            )
        return token_id

    def end_ids(self, eos_id: int | None) -> tuple[int, ...]:
        """Ids that end an answer, the declared one first."""
        ids = [eos_id, self.token_id("eot", None), self.token_id("eom", None)]
        ids += [i for i, token in enumerate(self.tokens) if token in _END_TOKENS]
        if "<|return|>" in self.tokens and "<|end|>" in self.tokens:
            # Harmony models end a message with <|end|> and go on with the next one.
            ids = [i for i in ids if i is None or self.tokens[i] != "<|end|>"]
        return tuple(dict.fromkeys(i for i in ids if i is not None))


def _pre_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning(
            "%s: metadata key tokenizer.ggml.pre is missing; text is cut by the rule 'default', "
            "as llama.cpp does, which may not be the model's own",
            where,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre is {name!r}, which is not supported; convert the model "
            f"from its Hugging Face folder instead; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _wrap(tokenizer: Tokenizer, config: Mapping[str, Any], where: str) -> None:
    for name in ("bos", "eos"):
        if config[f"add_{name}_token"] and config[f"{name}_token"] is None:
            raise CheckpointError(
                f"{where}: the tokenizer adds {name.upper()}, but metadata key "
                f"tokenizer.ggml.{name}_token_id is missing; convert the model to GGUF again"
            )
    add_bos_and_eos(
        tokenizer,
        config["bos_token"] if config["add_bos_token"] else None,
        config["eos_token"] if config["add_eos_token"] else None,
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = str(value)
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = str(value)
    return templates
