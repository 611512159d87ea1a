"""Whether a device can run a library, found out before anything is loaded onto it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..artifact.errors import ArtifactError
from ..artifact.machine_code import OLDEST_CUDA
from .devices import DeviceMemory
from .parameters import Parameter
from .runtime import Library, last_line
from .tvm_runtime import tvm_ffi


def check_device(library: Library, parameters: Sequence[Parameter], memory: DeviceMemory) -> None:
    """Raises ArtifactError, naming what the device lacks and what to do, if it cannot run the
    library or hold one of its parameters."""
    metadata = library.metadata
    _check_kind(metadata, memory)
    _check_architecture(metadata, memory)
    _check_limits(metadata.get("device_limits", {}), memory)
    if memory.kind == "vulkan":
        _check_vulkan_kernels(library, memory)
    limit = memory.max_tensor_bytes()
    largest = max(parameters, key=lambda parameter: parameter.num_bytes)
    if limit is not None and largest.num_bytes > limit:
        raise ArtifactError(
            f"{largest.name} has {largest.num_bytes:,} bytes, but a tensor on {memory.label} "
            f"has at most {limit:,}; take a smaller model or quantization, or another "
            "device (--device cpu)"
        )


def _check_kind(metadata: Mapping[str, Any], memory: DeviceMemory) -> None:
    kind = metadata.get("device", "cpu")
    if kind != memory.kind:
        raise ArtifactError(f"the library was compiled for {kind}, not for {memory.kind}")


def _check_architecture(metadata: Mapping[str, Any], memory: DeviceMemory) -> None:
    """Machine code for NVIDIA runs on its own major version from its minor one on; PTX, of the last
    architecture, on all later devices. AMD's runs on its own architecture only."""
    known: Sequence[str] = metadata.get("architectures", ())
    here = memory.architecture()
    if not known or here is None or here in known:
        return
    if memory.kind == "cuda" and (number := _number(here)) is not None:
        if number < OLDEST_CUDA:
            raise ArtifactError(
                f"{memory.label} is {here}, but the kernels need sm_{OLDEST_CUDA} or later; run "
                "the model on another device (--device cpu)"
            )
        numbers = [n for n in map(_number, known) if n is not None]
        if number >= numbers[-1]:
            return
        if any(n // 10 == number // 10 and n <= number for n in numbers):
            return
    raise ArtifactError(
        f"the library has machine code for {', '.join(known)}, but {memory.label} is {here}; "
        f"compile it with --target {memory.kind}:{here}"
    )


def _number(arch: str) -> int | None:
    """`sm_90` and `sm_90a` → 90."""
    digits = "".join(character for character in arch if character.isdigit())
    return int(digits) if digits else None


def _check_limits(limits: Mapping[str, int], memory: DeviceMemory) -> None:
    for name, what, most in (
        ("threads_per_block", "threads in a block", memory.max_threads()),
        ("shared_bytes_per_block", "bytes of shared memory in a block", memory.max_shared_bytes()),
    ):
        if most is not None and limits.get(name, 0) > most:
            raise ArtifactError(
                f"the library's kernels take up to {limits[name]} {what}, but {memory.label} has "
                f"{most}; run it on another device (--device cpu)"
            )


def _check_vulkan_kernels(library: Library, memory: DeviceMemory) -> None:
    check = tvm_ffi.get_global_func("everycast.vulkan.check_module")
    for module in library.modules(memory.kind):
        try:
            check(module, memory.index)
        except Exception as error:
            raise ArtifactError(
                f"{last_line(error)}; compile the model in a quantization whose name has f32 "
                "(all in 32 bits), or run it on another device (--device cpu)"
            ) from None
