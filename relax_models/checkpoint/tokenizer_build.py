"""Builds fast tokenizers (PyPI `tokenizers`) from vocabularies, merges and scores."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ...artifact.errors import CheckpointError
from .pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies


class TokenType(IntEnum):
    """Kinds of vocabulary entries; the numbers are those of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A checkpoint's tokenizer in memory, before it is written."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """The `tokenizer_config.json` to be, without added tokens and chat templates."""
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]
    """Name → Jinja template; the usual one is called `default`."""


def token_ids(tokens: Sequence[str], *, where: str) -> dict[str, int]:
    """Token → id. Raises CheckpointError if a token occurs twice."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        first: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if first.setdefault(token, token_id) != token_id:
                raise CheckpointError(
                    f"{where}: token {token!r} occurs twice, as ids {first[token]} and {token_id}; "
                    "the vocabulary is damaged, fetch or convert the model again"
                )
    return vocab


def byte_level_bpe(
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    pre: PreTokenizer,
    *,
    add_prefix_space: bool = False,
) -> Tokenizer:
    """A byte-level BPE tokenizer (GPT-2's kind); `merges` are in order of rank."""
    known = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    if len(known) != len(merges):
        logger.warning(
            "%d of %d merges name tokens that are not in the vocabulary; they are left out",
            len(merges) - len(known),
            len(merges),
        )
    tokenizer = Tokenizer(models.BPE(vocab, known, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in pre.expressions]
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_characters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    space_prefix: Literal["none", "first", "every"],
    where: str,
) -> Tokenizer:
    """A SentencePiece BPE model as ranked merges.

    `space_prefix` says where a space is put in front: nowhere, before the text, or before every
    stretch of text between special tokens (llama.cpp, and `transformers` with `legacy`).
    """
    vocab = token_ids(tokens, where=where)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == 2), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_from_scores(vocab, tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    space = normalizers.Replace(" ", _SPACE)
    if space_prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif space_prefix == "every":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
    else:
        tokenizer.normalizer = space
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    vocab: dict[str, int], tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a token out of two, best score first.

    SentencePiece merges the adjacent pair whose union has the best score, the leftmost of equals;
    ranking the pairs by that score makes BPE do the same. Equal scores are those of runs of one
    character, such as spaces: there the blocks grow from the left, so that the pair with the
    longest left part is the leftmost.
    """
    whole = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    ranked: list[tuple[float, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in whole:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def mark_added_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], special: frozenset[str]
) -> None:
    """Make control, unknown and user-defined tokens be found in text before anything else.

    Those of `special` count as control tokens whatever their type.
    """
    added: list[AddedToken] = []
    for token, kind in zip(tokens, types, strict=True):
        control = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in special
        if token and (control or kind == TokenType.USER_DEFINED):
            added.append(AddedToken(token, special=control, normalized=False))
    tokenizer.add_tokens(added)


def add_bos_and_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the tokenizer put these tokens, and no others, around a text.

    They appear where a text is encoded with `add_special_tokens=True`.
    """
    names = [token for token in (bos, eos) if token is not None]
    before, after = ([bos] if bos is not None else []), ([eos] if eos is not None else [])
    ids = [(t, i) for t in dict.fromkeys(names) if (i := tokenizer.token_to_id(t)) is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{t}:1" for t in before),
            "$B:1",
            *(f"{t}:1" for t in after),
        ],
        special_tokens=ids,
    )
