"""As much of ELF as an inspection needs: sections and symbols of 64-bit little-endian files.

Source: System V Application Binary Interface, chapter 4 (gABI 4.1).
"""

import struct
from dataclasses import dataclass

MAGIC = b"\x7fELF"
_SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
_NO_BITS = 8


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    kind: int
    address: int
    offset: int
    num_bytes: int
    link: int


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str
    address: int
    num_bytes: int


class Elf:
    """A file's sections and symbols. ValueError if it is none."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != MAGIC + b"\x02\x01":
            raise ValueError("it is no 64-bit little-endian ELF file")
        self.data = data
        try:
            self.sections = self._sections()
            self.symbols = {symbol.name: symbol for symbol in self._symbols()}
        except (struct.error, IndexError):
            raise ValueError("its ELF headers are damaged") from None

    def bytes_at(self, address: int) -> bytes:
        """What is loaded at `address` and after it, to the end of the section."""
        for section in self.sections:
            start = section.address
            if start and section.kind != _NO_BITS and start <= address < start + section.num_bytes:
                end = section.offset + section.num_bytes
                return self.data[section.offset + address - start : end]
        raise ValueError(f"nothing is loaded at {address:#x}")

    def _sections(self) -> list[Section]:
        table, size, count, names = struct.unpack_from("<Q10xHHH", self.data, 0x28)
        headers = [
            struct.unpack_from("<IIQQQQI", self.data, table + size * i) for i in range(count)
        ]
        start = headers[names][4] if headers else 0
        return [
            Section(self._text(start + name), kind, address, offset, num_bytes, link)
            for name, kind, _, address, offset, num_bytes, link in headers
        ]

    def _symbols(self) -> list[Symbol]:
        symbols = []
        for section in self.sections:
            if section.kind not in _SYMBOL_TABLES:
                continue
            start = self.sections[section.link].offset
            for offset in range(section.offset, section.offset + section.num_bytes, 24):
                name, _, address, num_bytes = struct.unpack_from("<I4sQQ", self.data, offset)
                symbols.append(Symbol(self._text(start + name), address, num_bytes))
        return symbols

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode(errors="replace")
