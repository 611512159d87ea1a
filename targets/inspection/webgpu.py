"""WGSL in libraries for browsers: what each kernel asks of a device, and whether it is valid.

Validity is told by Dawn, the WebGPU of Chromium, on its null backend, which needs no GPU; it comes
as npm's package `webgpu` for Node.js.
"""

import json
import math
import re
import shutil
import tempfile
from pathlib import Path

from ...artifact.errors import CompileError
from .library import Stream, kernel_names
from .programs import output_of
from .report import Finding, KernelUse
from .wasm import initial_memory

INSTALL = "npm install webgpu (in this folder; with Node.js 18 or later)"
MAX_BUFFERS, MAX_THREADS, MAX_SHARED_BYTES = 10, 256, 32 << 10
"""What WebLLM asks every device for; threads: what WebGPU promises."""
_SCRIPT = Path(__file__).parent / "validate_wgsl.mjs"
_CHECKOUT = Path(__file__).parents[2] / "web"
_MODULE = len("webgpu").to_bytes(8, "little") + b"webgpu"
_GROUP = re.compile(r"@workgroup_size\(([^)]*)\)")
_SHARED = re.compile(r"var<workgroup>\s+\w+\s*:\s*([^;]+);")
_TYPE = re.compile(r"(?:array<)?(?:vec([234])<)?(\w+(?:<\w+>)?)>?(?:, *(\d+)>)?")
_ENABLED = re.compile(r"^enable (\w+);", re.MULTILINE)
_SCALARS = {"f16": 2, "f32": 4, "i32": 4, "u32": 4, "bool": 4, "atomic<u32>": 4, "atomic<i32>": 4}


def inspect(path: Path) -> Finding:
    """Every kernel's demands, held against what WebLLM asks of devices, and Dawn's verdict where
    Dawn is installed. ValueError if the file is no library for browsers."""
    shaders = read_shaders(path.read_bytes())
    uses = tuple(_use(name, code) for name, code in shaders.items())
    faults = [fault for use in uses for fault in _beyond_limits(use)]
    enabled = sorted({word for code in shaders.values() for word in _ENABLED.findall(code)})
    facts = [f"WGSL's extensions: {', '.join(enabled) or 'none'}"]
    dawn = _find_dawn()
    if dawn is None:
        facts.append(f"not validated: Dawn is not installed; run: {INSTALL}")
        return Finding("a reader of WGSL", uses, tuple(facts), tuple(faults))
    try:
        version, found = _validate(dawn, shaders)
    except CompileError as error:
        facts.append(f"not validated: {error}")
        return Finding("a reader of WGSL", uses, tuple(facts), tuple(faults))
    facts.append("valid for Dawn" if not found else "Dawn refuses some")
    return Finding(f"Dawn (npm's webgpu {version})", uses, tuple(facts), (*faults, *found))


def read_shaders(data: bytes) -> dict[str, str]:
    """Kernel name → WGSL, of a library's bytes. ValueError if it holds none.

    The modules in it are as everywhere (`library.py`), but nothing names the place: the module of
    kind webgpu is found by its head.
    """
    memory = initial_memory(data)
    start = memory.find(_MODULE)
    if start < 0:
        raise ValueError("no module of kind webgpu is in it")
    stream = Stream(Stream(memory[start + len(_MODULE) :]).content())
    names = kernel_names(stream)
    shaders = {}
    for _ in range(stream.number()):
        name = stream.text()
        shaders[name] = stream.text()
    if missing := set(names) - set(shaders):
        raise ValueError(f"it lacks kernel {min(missing)}")
    return shaders


def _use(name: str, code: str) -> KernelUse:
    size = _GROUP.search(code)
    if size is None:
        raise ValueError(f"{name} is no kernel in WGSL")
    buffers = code.count("var<storage")
    return KernelUse(
        name,
        threads=math.prod(int(factor) for factor in size[1].split(",")),
        buffers=buffers,
        bindings=buffers + code.count("var<uniform"),
        shared_bytes=sum(_num_bytes(name, text.strip()) for text in _SHARED.findall(code)),
        code_bytes=len(code.encode()),
    )


def _num_bytes(kernel: str, text: str) -> int:
    """Bytes of a type of a block's memory."""
    match = _TYPE.fullmatch(text)
    if match is None or match[2] not in _SCALARS:
        raise ValueError(f"{kernel}: unknown type {text} in a block's memory")
    lanes = {None: 1, "2": 2, "3": 4, "4": 4}[match[1]]  # three lanes take the room of four
    return _SCALARS[match[2]] * lanes * int(match[3] or 1)


def _beyond_limits(use: KernelUse) -> list[str]:
    limits = (
        ("storage buffers", use.buffers, MAX_BUFFERS),
        ("threads", use.threads, MAX_THREADS),
        ("bytes of shared memory", use.shared_bytes, MAX_SHARED_BYTES),
    )
    return [
        f"{use.name} takes {value} {what}, devices need have no more than {limit}"
        for what, value, limit in limits
        if value is not None and value > limit
    ]


def _find_dawn() -> list[str] | None:
    """The command that validates, without the file; None where Node.js or Dawn is missing."""
    node = shutil.which("node")
    for folder in (Path.cwd(), _CHECKOUT):
        package = folder / "node_modules" / "webgpu"
        if node is not None and (package / "package.json").is_file():
            return [node, str(_SCRIPT), str(package)]
    return None


def _validate(command: list[str], shaders: dict[str, str]) -> tuple[str, list[str]]:
    """(Dawn's version, what it finds wrong). CompileError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shaders.json")
        path.write_text(json.dumps(shaders), encoding="utf-8")
        answer = output_of([*command, str(path)])
    try:
        # What comes before is Dawn's own.
        found = json.loads(answer.strip().rpartition("\n")[2])
        return str(found["version"]), [str(fault) for fault in found["faults"]]
    except (ValueError, KeyError, TypeError):
        raise CompileError("Dawn's answer cannot be read; install it again") from None
