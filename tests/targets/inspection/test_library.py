"""Reading libraries: real ones of this machine, and damaged ones."""

import struct
from pathlib import Path

import pytest
from everycast.targets.inspection.elf import Elf
from everycast.targets.inspection.library import Stream, device_kernels, read_library
from everycast.targets.inspection.macho import MachO


@pytest.fixture(scope="module")
def library(tiny_artifact: Path) -> Path:
    return tiny_artifact / "lib" / "cpu.so"


def test_a_library_holds_its_modules(library: Path) -> None:
    read = read_library(library)
    assert set(read.modules) == {"relax.VMExecutable", "_lib"}
    assert b"forward" in read.module("relax.VMExecutable")
    with pytest.raises(ValueError, match="no module of kind cuda is in it"):
        read.module("cuda")


def test_sections_and_symbols(library: Path) -> None:
    elf = Elf(library.read_bytes())
    assert ".text" in {section.name for section in elf.sections}
    symbol = elf.symbols["__tvm_ffi_sample_from_logits"]
    assert symbol.num_bytes > 100 and len(elf.bytes_at(symbol.address)) >= symbol.num_bytes
    with pytest.raises(ValueError, match="nothing is loaded at"):
        elf.bytes_at(1 << 60)


def test_damage_is_told(library: Path, tmp_path: Path) -> None:
    data = library.read_bytes()
    for content, message in (
        (b"#!/bin/sh", "no 64-bit little-endian ELF file"),
        (data[:5000], "ELF headers are damaged"),
        (data.replace(b"__tvm_ffi__library_bin", b"__tvm_ffi__library_bim"), "no library that TVM"),
    ):
        path = tmp_path / "library.so"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_library(path)


def test_records_that_end_early() -> None:
    with pytest.raises(ValueError, match="modules in it are damaged"):
        Stream(struct.pack("<Q", 9) + b"short").text()


def test_names_of_kernels() -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def numbers(*values: int) -> bytes:
        return struct.pack(f"<Q{len(values)}i", len(values), *values)

    kernel = text("k") + text("k") + numbers(1, 2) + struct.pack("<Q", 1) + text("blockIdx.x")
    module = text("cl") + struct.pack("<Q", 1) + kernel + numbers(0, 0) + text("source")
    names, rest = device_kernels(module)
    assert names == ["k"] and rest.text() == "source" and rest.is_at_end


def test_other_mach_o_files_are_refused() -> None:
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 2, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="not that of a dynamic library"):
        MachO(header)
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 1, 8, 0, 0)
    with pytest.raises(ValueError, match="longer than the commands"):
        MachO(header + struct.pack("<II", 0x19, 72))
    with pytest.raises(ValueError, match="damaged"):
        MachO(header)
    unsigned = MachO(struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="no code signature"):
        unsigned.check_signature()
