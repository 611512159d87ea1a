"""Vulkan for TVM: `device_api.vulkan`, and the loader of the kernels in a library.

TVM's own runtime must be loaded before. The environment chooses the device
(`EVERYCAST_VULKAN_DEVICE`, a number or part of a name) and asks for Vulkan's validation layer
(`EVERYCAST_VULKAN_VALIDATION=1`, messages to stderr).
"""

import atexit
import ctypes
import functools
from pathlib import Path

from ..artifact.cache import cache_dir
from ..artifact.errors import CompileError
from .build import build_native

_HEADERS = {"vulkan/vulkan_core.h": "apt install libvulkan-dev"}


@functools.cache
def load_vulkan_runtime() -> None:
    """Load the runtime into this process, once; compile it first if need be (some 20 s).

    It loads on machines without Vulkan too: the first use of a device says what is missing there.
    Raises CompileError if it cannot be compiled.
    """
    path = build_native("vulkan", Path(__file__).parent / "vulkan", _HEADERS)
    try:
        library = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    except OSError as error:
        raise CompileError(
            f"the Vulkan runtime does not load: {error}; delete {path} and start again"
        ) from None
    folder = cache_dir() / "vulkan"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # pipelines are then made anew by each process
    library.everycast_vulkan_set_cache_folder(str(folder).encode())
    atexit.register(library.everycast_vulkan_save_pipelines)
