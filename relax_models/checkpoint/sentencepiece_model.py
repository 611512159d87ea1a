"""Reads a SentencePiece `tokenizer.model`: the few fields of its protobuf that a tokenizer needs.

Field numbers are those of `src/sentencepiece_model.proto` of SentencePiece.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...artifact.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """`tokens`, `scores` and `types` are parallel; `types` are SentencePiece's numbers."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    kind: Literal["unigram", "bpe", "word", "char"]
    bos_id: int
    eos_id: int
    add_dummy_prefix: bool
    changes_text: bool
    """Whether text is normalized beyond turning spaces into U+2581."""


def read_sentencepiece(data: bytes, *, where: str) -> SentencePieceModel:
    """The model in `data`. Raises CheckpointError if it is damaged or no SentencePiece model."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, bytes | int | float] = {}
    normalizer: dict[int, bytes | int | float] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                tokens.append(_bytes(piece[1]).decode("utf-8"))
                scores.append(float(piece.get(2, 0.0)))
                types.append(int(piece.get(3, 1)))
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
            elif number == 3:
                normalizer = dict(_fields(_bytes(value)))
        if not tokens:
            raise ValueError("no pieces")
        kinds: tuple[Literal["unigram", "bpe", "word", "char"], ...]
        kinds = ("unigram", "bpe", "word", "char")
        return SentencePieceModel(
            tokens,
            scores,
            types,
            kind=kinds[int(trainer.get(3, 1)) - 1],
            bos_id=_signed(trainer.get(41, 1)),
            eos_id=_signed(trainer.get(42, 2)),
            add_dummy_prefix=bool(normalizer.get(3, 1)),
            # A table of character rewrites, or the removal of repeated spaces.
            changes_text=bool(normalizer.get(2, b"")) or bool(normalizer.get(4, 1)),
        )
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{where} is not a readable SentencePiece model ({error}); fetch it again"
        ) from error


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Field number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError(f"cut off at byte {len(data)}")
            yield key >> 3, data[at : at + length]
            at += length
        elif wire == 5:
            yield key >> 3, float(struct.unpack_from("<f", data, at)[0])
            at += 4
        elif wire == 1:
            yield key >> 3, float(struct.unpack_from("<d", data, at)[0])
            at += 8
        else:
            raise ValueError(f"unknown wire type {wire} at byte {at}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"number too long at byte {at}")


def _bytes(value: bytes | int | float) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _signed(value: bytes | int | float) -> int:
    """A protobuf int32, which is written as 64 bits where negative (-1: no such token)."""
    number = int(value)
    return number - (1 << 64) if number >= 1 << 63 else number
