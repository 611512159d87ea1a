"""What MLC's clients need in `mlc-chat-config.json` beside what our engine reads."""

import json
from pathlib import Path
from typing import Any

from ..relax_models.checkpoint.tokenizer import TokenizerInfo
from .conv_template import conv_template

SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}  # fmt: skip
"""Where the checkpoint gives no advice: clients have no defaults of their own."""


def client_config(folder: Path, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Sampling settings, `tokenizer_info` and `conv_template`, from the tokenizer in `folder`."""
    return {
        **SAMPLING,
        "tokenizer_info": tokenizer_info(folder),
        "conv_template": conv_template(folder, tokenizer),
    }


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """How tokens become text, as MLC says it; grammars need it.

    `byte_level`: characters stand for bytes (GPT-2). `byte_fallback`: ▁ is a space, <0x0A> a byte
    (SentencePiece).
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    decoders = _kinds(tokenizer.get("decoder"), "decoders")
    normalizers = _kinds(tokenizer.get("normalizer"), "normalizers")
    return {
        "token_postproc_method": "byte_level" if "ByteLevel" in decoders else "byte_fallback",
        "prepend_space_in_encode": "Prepend" in normalizers,
        "strip_space_in_decode": "Strip" in decoders,
    }


def _kinds(component: dict[str, Any] | None, members: str) -> set[str]:
    """The types of a part of `tokenizer.json`, which may be a sequence of others."""
    if component is None:
        return set()
    if component["type"] == "Sequence":
        return {str(member["type"]) for member in component[members]}
    return {str(component["type"])}
