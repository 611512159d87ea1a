"""What bytes a vocabulary entry stands for: the `decoder` of a tokenizer.json, one token a time.

Two families exist among generating models. Byte-level BPE spells every byte as one printable
character (GPT-2's table). SentencePiece writes a space as U+2581 and bytes it has no token for as
`<0xF0>`; the space it puts in front of a text is taken off the first token again.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from ..artifact.errors import ArtifactError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: character → byte, for all 256 bytes.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


@dataclass(slots=True)
class TokenText:
    """The rules of one decoder."""

    is_byte_level: bool = False
    has_byte_tokens: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    """Within a token's text, in order."""
    start_characters: bytes = b""
    """The character taken off the start of a text..."""
    max_start_characters: int = 0
    """...and how many of it at most."""
    _alphabet: dict[str, int] = field(default_factory=byte_level_alphabet)

    def to_bytes(self, token: str) -> bytes:
        """The bytes a token's vocabulary text stands for."""
        if self.is_byte_level:
            values = [self._alphabet.get(character) for character in token]
            # A token with a character outside the table was added as plain text.
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode("utf-8")
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    def strip_start(self, first: bytes) -> bytes:
        """`first` without the characters the decoder takes off the start of a text."""
        count = 0
        while (
            count < self.max_start_characters and first[count : count + 1] == self.start_characters
        ):
            count += 1
        return first[count:]


def read_token_text(decoder: dict[str, Any] | None) -> TokenText:
    """The rules of a `decoder` object of tokenizer.json.

    Raises ArtifactError for one whose text of a token depends on its neighbours.
    """
    rules = TokenText()
    if decoder is None:
        raise ArtifactError("tokenizer.json has no decoder, so its tokens cannot become text")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    is_fused = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                rules.is_byte_level = True
            case {"type": "ByteFallback"}:
                rules.has_byte_tokens = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                rules.replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                rules.replacements.append((old, " "))
                if scheme != "never":
                    # The library drops every such mark of the first token, not only one.
                    rules.start_characters = b" "
                    rules.max_start_characters = 1 << 30
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if is_fused:
                rules.start_characters = b" "
                rules.max_start_characters = start
            case _:
                raise ArtifactError(
                    f"tokenizer.json has a decoder of type {step.get('type')!r} that is not "
                    "supported for generation; supported: ByteLevel, and Replace, Metaspace, "
                    "ByteFallback, Fuse and Strip as SentencePiece tokenizers use them"
                )
    return rules
