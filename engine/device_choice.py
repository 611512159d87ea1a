"""Which device `auto` means: the best one here that can run the model, and why not a better one."""

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ..artifact.errors import ArtifactError, CapacityError, CompileError
from ..artifact.manifest import Manifest
from .device_runtimes import has_runtime
from .devices import CPU, DeviceInfo, list_devices

logger = logging.getLogger(__name__)

AUTO_KINDS = ("cuda", "rocm", "metal", "vulkan")
"""Kinds that `auto` looks for, best first; the CPU comes after them."""

_SIGNS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("/dev/nvidia[0-9]*", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "vulkan": ("/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/dxg"),
}
"""Kind → what is there on Linux if a GPU is: its runtime need not be loaded to know."""

Opened = TypeVar("Opened")


def has_sign_of(kind: str) -> bool:
    """Whether it looks as if there were a GPU for `kind` here. Loads nothing."""
    if kind == "vulkan" and _is_asked_for():
        return True
    patterns = _SIGNS.get(kind, ())
    return not patterns or any(True for p in patterns for _ in Path("/").glob(p[1:]))


def find_gpu(kind: str) -> tuple[DeviceInfo | None, str]:
    """The first GPU of a kind (a driver that computes on the CPU is none, unless Vulkan's variable
    asks for a device); or None, with the reason
    if there seems to be a GPU that cannot be used."""
    if not has_runtime(kind) or (kind == "vulkan" and not has_sign_of(kind)):
        return None, ""
    try:
        gpus = [device for device in list_devices(kind) if device.is_gpu or _is_asked_for()]
    except ArtifactError as error:
        return None, str(error) if has_sign_of(kind) else ""
    return (gpus[0], "") if gpus else (None, "")


def best_kind() -> str:
    """The best kind of device that is here."""
    gpu = next(_gpus([]), None)
    return CPU if gpu is None else gpu.kind


def _is_asked_for() -> bool:
    """Whether the user named a Vulkan device, whatever it is."""
    return bool(os.environ.get("EVERYCAST_VULKAN_DEVICE"))


def open_best(
    open_on: Callable[[str], Opened], lacks: Callable[[str], str] = lambda kind: ""
) -> tuple[Opened, str]:
    """`open_on(kind)` for the best kind that is here and takes the model, and one line that says
    what was chosen and why.

    `lacks(kind)` says what would have to be done first, if anything. Raises what `open_on` does for
    the CPU, the last choice.
    """
    refusals: list[str] = []
    for gpu in _gpus(refusals):
        if reason := lacks(gpu.kind):
            refusals.append(f"{gpu.label}: {reason}")
            continue
        try:
            return open_on(gpu.kind), _line(f"{gpu.label}, the best that is here", refusals)
        except (ArtifactError, CapacityError, CompileError) as error:
            refusals.append(f"{gpu.label}: {error}")
    opened = open_on(CPU)
    return opened, _line(CPU if refusals else f"{CPU}, no GPU was found", refusals)


def _gpus(refusals: list[str]) -> Iterator[DeviceInfo]:
    for kind in AUTO_KINDS:
        gpu, reason = find_gpu(kind)
        if gpu is not None:
            yield gpu
        elif reason:
            refusals.append(f"{kind}: {reason.removeprefix(f'cannot run on {kind}: ')}")


def _line(choice: str, refusals: list[str]) -> str:
    return f"device: {choice}" + "".join(f"; not {reason}" for reason in refusals)


def how_to_add(manifest: Manifest, folder: Path, kind: str) -> str:
    """What to do about an artifact without a library for `kind`; empty if it has one."""
    if any(name.partition(":")[0] == kind for name in manifest.libraries):
        return ""
    quantization = manifest.weights.quantization
    command = ["everycast", "compile", manifest.model.source, "--target", kind]
    command += ["-o", str(folder.parent)]
    command += [] if quantization == "gguf" else ["-q", quantization]  # GGUF: as it is
    return f"the artifact has no library for it; add one: {shlex.join(command)}"
