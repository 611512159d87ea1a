"""GLSL compute shaders to SPIR-V: compiled, validated, optimized, each by its own program."""

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...artifact.errors import CompileError
from .tools import INSTALL, find_tool

ENVIRONMENT = ("--target-env", "vulkan1.2")
"""What the programs are told of the device."""


def compile_shaders(sources: Mapping[str, str]) -> dict[str, bytes]:
    """SPIR-V of each shader, by kernel name. Raises CompileError, naming the kernel, for one that a
    tool refuses, and for a tool that is missing."""
    for tool in ("glslangValidator", "spirv-val", "spirv-opt"):
        find_tool(tool)
    # The programs do the work, so threads suffice.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        codes = pool.map(_compile_once, sources.keys(), sources.values())
        return dict(zip(sources, codes, strict=True))


@functools.lru_cache(maxsize=4096)
def _compile_once(name: str, source: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="everycast-spirv-") as folder:
        shader, plain, small = (Path(folder) / file for file in ("a.comp", "a.spv", "b.spv"))
        shader.write_text(source, encoding="utf-8")
        _run(name, "glslangValidator", "-V", *ENVIRONMENT, "-o", plain, shader)
        _run(name, "spirv-val", *ENVIRONMENT, plain)
        _run(name, "spirv-opt", "-O", plain, "-o", small)
        return small.read_bytes()


def _run(kernel: str, program: str, *arguments: str | Path) -> None:
    tool = find_tool(program)
    command = [str(tool.path), *map(str, arguments)]
    environment = {**os.environ, **tool.environment}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, check=False
        )
    except OSError as error:
        raise CompileError(f"{tool.path} does not start: {error}; run: {INSTALL}") from None
    if run.returncode != 0:
        lines = (run.stdout + run.stderr).splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise CompileError(
            f"kernel '{kernel}': {program} refuses the shader: {errors[0].strip()}; "
            "report this, with the model and the target"
        )
