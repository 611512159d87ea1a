"""SPIR-V, checked by its validator and counted by its disassembler."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...artifact.errors import CompileError
from ..vulkan.spirv import ENVIRONMENT
from ..vulkan.tools import INSTALL, Tool, find_tool
from .library import Library, Stream
from .programs import first_line, output_of, run_program, version_of
from .report import Finding, KernelUse, ToolMissing


def inspect(library: Library) -> Finding:
    """Every kernel's SPIR-V, validated. ToolMissing without SPIRV-Tools; ValueError if the library
    holds none."""
    stream = Stream(library.module("vulkan"))
    shaders = []
    while not stream.is_at_end:
        shaders.append((stream.text(), stream.content(), json.loads(stream.text())))
    try:
        validator, disassembler = find_tool("spirv-val"), find_tool("spirv-dis")
    except CompileError:
        raise ToolMissing(
            f"SPIR-V is read by spirv-val and spirv-dis, which are not installed; run: {INSTALL}"
        ) from None
    # The programs do the work, so threads suffice.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def look(shader: tuple[str, bytes, dict[str, int]]) -> tuple[KernelUse, str | None]:
            name, code, description = shader
            path = Path(folder, f"{name}.spv")
            path.write_bytes(code)
            fault = _fault(validator, name, path)
            listing = output_of(
                [str(disassembler.path), "--raw-id", str(path)],
                environment=disassembler.environment,
            )
            lines = [line for line in listing.splitlines() if line and line[0] != ";"]
            use = KernelUse(
                name,
                shared_bytes=description["shared_bytes"],
                code_bytes=len(code),
                instructions=len(lines),
            )
            return use, fault

        found = list(pool.map(look, shaders))
    version = version_of([str(validator.path)], environment=validator.environment)
    faults = tuple(fault for _, fault in found if fault is not None)
    return Finding(version, tuple(use for use, _ in found), ("valid for Vulkan 1.2",), faults)


def _fault(validator: Tool, name: str, path: Path) -> str | None:
    code, output, errors = run_program(
        [str(validator.path), *ENVIRONMENT, str(path)], environment=validator.environment
    )
    return f"{name}: {first_line(errors or output)}" if code != 0 else None
