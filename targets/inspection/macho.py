"""As much of Mach-O as an inspection needs: load commands, symbols and the code signature of
64-bit files. Sources: Apple's <mach-o/loader.h> and <kern/cs_blobs.h>."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\xcf\xfa\xed\xfe"
_CPU_TYPES = {0x0100000C: "arm64", 0x01000007: "x86_64"}
_DYLIB = 6
_PLATFORMS = {1: "macOS", 2: "iOS", 7: "iOS simulator"}
_SEGMENT, _SYMTAB, _LOAD_DYLIB, _ID_DYLIB = 0x19, 0x2, 0xC, 0xD
_CODE_SIGNATURE, _BUILD_VERSION = 0x1D, 0x32
_SUPER_BLOB, _CODE_DIRECTORY, _ADHOC = 0xFADE0CC0, 0xFADE0C02, 0x2


@dataclass(frozen=True, slots=True)
class Segment:
    name: str
    address: int
    offset: int
    num_bytes: int


class MachO:
    """A dynamic library's load commands, read. ValueError if it is none.

    `platform` is for example `macOS 13.0`, `libraries` are what it is linked with.
    """

    def __init__(self, data: bytes) -> None:
        if data[:4] != MAGIC:
            raise ValueError("it is no 64-bit Mach-O file")
        self.data = data
        self.segments: list[Segment] = []
        self.symbols: dict[str, int] = {}
        self.libraries: list[str] = []
        self.name = ""
        self.platform = ""
        self._signature: tuple[int, int] | None = None
        try:
            _, cpu, _, kind, self.num_commands, num_bytes = struct.unpack_from("<6I", data)
            if kind != _DYLIB:
                raise ValueError(f"its file type is {kind}, not that of a dynamic library")
            self.cpu = _CPU_TYPES.get(cpu, f"cpu type {cpu:#x}")
            position = 32
            for _ in range(self.num_commands):
                command, size = struct.unpack_from("<II", data, position)
                if size < 8 or position + size > 32 + num_bytes:
                    raise ValueError("a load command is longer than the commands")
                self._read(command, position)
                position += size
        except (struct.error, IndexError):
            raise ValueError("its load commands are damaged") from None
        for segment in self.segments:
            if segment.offset + segment.num_bytes > len(data):
                raise ValueError(f"segment {segment.name} ends behind the file")

    def bytes_at(self, address: int) -> bytes:
        """What is loaded at `address` and after it, to the end of the segment."""
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.num_bytes:
                start = segment.offset - segment.address
                return self.data[start + address : start + segment.address + segment.num_bytes]
        raise ValueError(f"nothing is loaded at {address:#x}")

    def check_signature(self) -> str:
        """What the code signature is (`ad hoc`); Macs with Apple's processors load nothing without.
        ValueError if there is none, or if the file is not what was signed."""
        if self._signature is None:
            raise ValueError("it has no code signature, without which Macs do not load it")
        start, _ = self._signature
        for blob in self._code_directories(start):
            self._check_directory(blob)
            flags = struct.unpack_from(">I", self.data, blob + 12)[0]
            return "ad hoc" if flags & _ADHOC else "signed"
        raise ValueError("its code signature has no code directory")

    def _read(self, command: int, position: int) -> None:
        data = self.data
        if command == _SEGMENT:
            name, address, _, offset, size = struct.unpack_from("<16sQQQQ", data, position + 8)
            self.segments.append(Segment(name.rstrip(b"\0").decode(), address, offset, size))
        elif command == _SYMTAB:
            table, count, strings = struct.unpack_from("<III", data, position + 8)
            for i in range(count):
                name, _, address = struct.unpack_from("<I4sQ", data, table + 16 * i)
                self.symbols[self._text(strings + name)] = address
        elif command in (_LOAD_DYLIB, _ID_DYLIB):
            name = self._text(position + struct.unpack_from("<I", data, position + 8)[0])
            if command == _ID_DYLIB:
                self.name = name
            else:
                self.libraries.append(name)
        elif command == _BUILD_VERSION:
            platform, oldest = struct.unpack_from("<II", data, position + 8)
            name = _PLATFORMS.get(platform, f"platform {platform}")
            self.platform = f"{name} {oldest >> 16}.{oldest >> 8 & 0xFF}"
        elif command == _CODE_SIGNATURE:
            self._signature = struct.unpack_from("<II", data, position + 8)

    def _code_directories(self, start: int) -> Iterator[int]:
        magic, _, count = struct.unpack_from(">III", self.data, start)
        if magic != _SUPER_BLOB:
            raise ValueError("its code signature is damaged")
        for i in range(count):
            _, offset = struct.unpack_from(">II", self.data, start + 12 + 8 * i)
            if struct.unpack_from(">I", self.data, start + offset)[0] == _CODE_DIRECTORY:
                yield start + offset

    def _check_directory(self, blob: int) -> None:
        """Compare the hash of every page with the signed one."""
        hashes, _, _, count, limit, size, kind, _, page = struct.unpack_from(
            ">IIIIIBBBB", self.data, blob + 16
        )
        if (size, kind) != (32, 2):
            raise ValueError(f"its pages are signed by hashes of kind {kind}, not by SHA-256")
        for i in range(count):
            begin = i << page
            code = self.data[begin : min(begin + (1 << page), limit)]
            signed = self.data[blob + hashes + 32 * i : blob + hashes + 32 * (i + 1)]
            if hashlib.sha256(code).digest() != signed:
                raise ValueError(f"page {i} is not what was signed")

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode(errors="replace")
