"""Every library of an artifact, looked into by its target's tool."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...artifact.errors import CompileError
from ...artifact.manifest import LibraryStamp, library_file, read_manifest
from . import cpu, cuda, metal, opencl, rocm, vulkan, webgpu
from .library import Library, read_library
from .report import Finding, LibraryReport, ToolMissing

_INSPECTORS: Mapping[str, Callable[[Library], Finding]] = {
    "cuda": cuda.inspect,
    "rocm": rocm.inspect,
    "vulkan": vulkan.inspect,
    "metal": metal.inspect,
    "opencl": opencl.inspect,
}


def inspect_artifact(folder: Path) -> list[LibraryReport]:
    """A report of each library. ArtifactError if the folder holds no artifact, or a library of it
    is missing or damaged."""
    manifest = read_manifest(folder)
    return [
        _report(target, stamp, library_file(folder, stamp))
        for target, stamp in manifest.libraries.items()
    ]


def _report(target: str, stamp: LibraryStamp, path: Path) -> LibraryReport:
    finding = missing = None
    try:
        finding = _inspect(target.partition(":")[0], path)
    except ToolMissing as error:
        missing = str(error)
    except (CompileError, ValueError) as error:
        finding = Finding("", (), faults=(str(error),))
    return LibraryReport(target, stamp.file, stamp.platform, path.stat().st_size, finding, missing)


def _inspect(kind: str, path: Path) -> Finding:
    if kind == "cpu":
        return cpu.inspect(read_library(path), path)
    if kind == "webgpu":
        return webgpu.inspect(path)
    if kind not in _INSPECTORS:
        raise ToolMissing(f"libraries for {kind} are not read by this version")
    return _INSPECTORS[kind](read_library(path))
