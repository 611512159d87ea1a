"""The modules inside a compiled library, as TVM stores them.

`export_library` keeps what is not machine code of the host under one symbol. Its form (source:
tvm-ffi, `src/ffi/extra/library_module.cc`; all numbers are uint64, little-endian):

    size, then: import tree as two lists of numbers, and for each module its kind and its bytes
    (a text or bytes is its length and what it holds; the host's own code, kind `_lib`, has none)
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from . import elf, macho

_SYMBOL = "__tvm_ffi__library_bin"
_HOST = "_lib"


class Stream:
    """Reads TVM's records one after the other; ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    @property
    def is_at_end(self) -> bool:
        return self.position >= len(self.data)

    def number(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def numbers(self) -> list[int]:
        return [self.number() for _ in range(self.number())]

    def content(self) -> bytes:
        return self._take(self.number())

    def text(self) -> str:
        return self.content().decode()

    def skip_list(self, num_bytes: int) -> None:
        """Pass over a list of records of `num_bytes` each."""
        self._take(self.number() * num_bytes)

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise ValueError("the modules in it are damaged")
        taken = self.data[self.position : end]
        self.position = end
        return taken


@dataclass(frozen=True, slots=True)
class Library:
    """A library's file, and the modules in it: kind → bytes."""

    file: elf.Elf | macho.MachO
    modules: dict[str, bytes]

    def module(self, kind: str) -> bytes:
        """ValueError if there is none of that kind."""
        if kind not in self.modules:
            raise ValueError(f"no module of kind {kind} is in it")
        return self.modules[kind]


def read_library(path: Path) -> Library:
    """ValueError if the file is no library that TVM wrote."""
    data = path.read_bytes()
    file: elf.Elf | macho.MachO
    if data.startswith(macho.MAGIC):
        file = macho.MachO(data)
        address = file.symbols.get(f"_{_SYMBOL}")
    else:
        file = elf.Elf(data)
        symbol = file.symbols.get(_SYMBOL)
        address = symbol.address if symbol is not None else None
    if address is None:
        raise ValueError("it is no library that TVM wrote")
    start = file.bytes_at(address)
    if len(start) < 8 or len(start) < 8 + struct.unpack_from("<Q", start)[0]:
        raise ValueError("the modules in it are damaged")
    stream = Stream(start[8 : 8 + struct.unpack_from("<Q", start)[0]])
    for _ in range(2):
        stream.numbers()  # the import tree
    modules = {}
    while not stream.is_at_end:
        kind = stream.text()
        modules[kind] = b"" if kind == _HOST else stream.content()
    return Library(file, modules)


def device_kernels(module: bytes) -> tuple[list[str], Stream]:
    """Names of the kernels in a module of TVM's kinds cuda, hip, metal and opencl, and the rest of
    it, which is their code.

    Source: TVM, `src/runtime/meta_data.h`: a format, then for each kernel its name twice, types of
    its arguments (4 bytes each), names of its axes, and flags (4 bytes each).
    """
    stream = Stream(module)
    stream.text()
    return kernel_names(stream), stream


def kernel_names(stream: Stream) -> list[str]:
    """Names of the kernels that such a module tells of, read off the stream."""
    names = []
    for _ in range(stream.number()):
        names.append(stream.text())
        stream.content()
        stream.skip_list(4)
        for _ in range(stream.number()):
            stream.content()
        stream.skip_list(4)
    return names
