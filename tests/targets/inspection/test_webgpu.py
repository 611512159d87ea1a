"""Libraries for browsers, made here byte by byte: what an inspection reads of them."""

import struct
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.targets.inspection import artifact, webgpu
from everycast.targets.inspection.wasm import initial_memory

ADDRESS = 70_000
GOOD = """enable f16;
@group(0) @binding(0) var<storage, read> x : array<f16>;
@group(0) @binding(1) var<storage, read_write> y : array<f32>;
struct Sizes { n: u32 }
@group(0) @binding(2) var<uniform> sizes : Sizes;
var<workgroup> lines : array<vec3<f32>, 8>;
var<workgroup> parts : array<f32, 64>;
@compute @workgroup_size(32, 2, 1)
fn good(@builtin(local_invocation_index) i : u32) {
  parts[i] = f32(x[i]);
  lines[i % 8u] = vec3<f32>(parts[i]);
  workgroupBarrier();
  if (i < sizes.n) { y[i] = parts[63u - i] + lines[0].x; }
}
"""
BAD = """@group(0) @binding(0) var<storage, read_write> y : array<f32>;
@compute @workgroup_size(512)
fn bad() { y[0] = 1; y[0] = 1u; }
"""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def leb(value: int) -> bytes:
    pieces = []
    while value >= 0x80:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*pieces, value])


def section(number: int, content: bytes) -> bytes:
    return bytes([number]) + leb(len(content)) + content


def module(shaders: dict[str, str], names: list[str] | None = None) -> bytes:
    """As TVM writes it: functions with a tensor and a size each, then their sources."""
    names = list(shaders) if names is None else names
    described = b"".join(
        text(name) + text(name) + struct.pack("<QII", 2, 1, 2) + struct.pack("<Q", 1)
        + text("blockIdx.x") + struct.pack("<Q", 0)
        for name in names
    )  # fmt: skip
    sources = b"".join(text(name) + text(code) for name, code in shaders.items())
    content = struct.pack("<Q", len(names)) + described + struct.pack("<Q", len(shaders)) + sources
    return text("webgpu") + struct.pack("<Q", len(content)) + content


def library(content: bytes, address: int = ADDRESS) -> bytes:
    """A module whose memory begins with a byte, and has `content` at an address."""
    segments = [(0, b"\x01"), (address, b"head" + content)]
    data = leb(len(segments)) + b"".join(
        b"\0\x41" + leb(start) + b"\x0b" + leb(len(held)) + held for start, held in segments
    )
    return b"\0asm\x01\0\0\0" + section(1, b"\0") + section(11, data) + section(0, b"\x01x")


@pytest.fixture
def no_dawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webgpu.shutil, "which", lambda _: None)


def inspected(tmp_path: Path, shaders: dict[str, str]) -> webgpu.Finding:
    path = tmp_path / "webgpu.wasm"
    path.write_bytes(library(module(shaders)))
    return webgpu.inspect(path)


def test_what_kernels_ask_of_a_device(tmp_path: Path, no_dawn: None) -> None:
    found = inspected(tmp_path, {"good": GOOD})
    (use,) = found.kernels
    assert (use.name, use.threads, use.buffers, use.bindings) == ("good", 64, 2, 3)
    assert (use.shared_bytes, use.code_bytes) == (8 * 16 + 64 * 4, len(GOOD))
    assert found.faults == ()
    assert "WGSL's extensions: f16" in found.facts
    assert any("not validated" in fact and "npm install webgpu" in fact for fact in found.facts)


def test_more_than_devices_have_is_a_fault(tmp_path: Path, no_dawn: None) -> None:
    many = "".join(
        f"@group(0) @binding({i}) var<storage, read> x{i} : array<f32>;\n" for i in range(11)
    )
    large = "var<workgroup> a : array<vec4<f32>, 4096>;\n@compute @workgroup_size(8)\nfn f() {}"
    found = inspected(tmp_path, {"bad": BAD, "large": many + large})
    assert [fault.partition(",")[0] for fault in found.faults] == [
        "bad takes 512 threads",
        "large takes 11 storage buffers",
        "large takes 65536 bytes of shared memory",
    ]


def test_dawn_says_what_is_not_valid(tmp_path: Path) -> None:
    if webgpu._find_dawn() is None:
        pytest.skip("Dawn is not installed: run npm ci in web")
    found = inspected(tmp_path, {"good": GOOD, "bad": BAD})
    assert found.tool.startswith("Dawn")
    assert [fault for fault in found.faults if fault.startswith("bad: line 3: ")]
    assert not [fault for fault in found.faults if fault.startswith("good")]
    assert "valid for Dawn" in inspected(tmp_path, {"good": GOOD}).facts


def test_a_dawn_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webgpu, "_find_dawn", lambda: ["false"])
    found = inspected(tmp_path, {"good": GOOD})
    assert found.faults == () and any("not validated: false failed" in f for f in found.facts)

    def garbled(command: list[str]) -> str:
        return "no JSON"

    monkeypatch.setattr(webgpu, "output_of", garbled)
    with pytest.raises(CompileError, match="install it again"):
        webgpu._validate([], {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF", "no WebAssembly module"),
        (library(b""), "no module of kind webgpu"),
        (library(module({"good": GOOD}))[:-400], "damaged"),
        (library(module({"good": GOOD})[:-100]), "damaged"),
        (library(module({"good": GOOD}, ["good", "other"])), "lacks kernel other"),
        (b"\0asm\x01\0\0\0" + section(11, b"\x01\x01\x00"), "no fixed place"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        webgpu.read_shaders(data)


def test_a_file_that_is_none_is_a_fault_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "webgpu.wasm"
    path.write_bytes(b"other")
    with pytest.raises(ValueError, match="no WebAssembly module"):
        artifact._inspect("webgpu", path)


def test_memory_has_every_segment_at_its_address() -> None:
    memory = initial_memory(library(b"!"))
    assert memory[:1] == b"\x01" and memory[ADDRESS:] == b"head!"
    assert memory[1:ADDRESS].count(0) == ADDRESS - 1
