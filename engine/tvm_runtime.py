"""TVM's runtime: `tvm_ffi`, without torch, which it would load if that is installed (2 s, 300 MB);
and the names of the runtime's files."""

import sys
from types import ModuleType
from typing import Any

_SUFFIXES = {"linux": "so", "darwin": "dylib"}
"""By `sys.platform`."""


def runtime_file(part: str = "", platform: str = sys.platform) -> str:
    """The name of a file of TVM's runtime in its wheel's `lib`: the runtime itself, or a part of it
    (`extra`, `metal`)."""
    name = f"libtvm_runtime_{part}" if part else "libtvm_runtime"
    return f"{name}.{_SUFFIXES.get(platform, 'so')}"


def _import_without_torch() -> Any:
    # None in sys.modules makes `import torch` an ImportError, which tvm_ffi takes for "absent".
    # A torch that the program already uses stays as it is.
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    hides_torch = "torch" not in modules
    if hides_torch:
        modules["torch"] = None
    try:
        import tvm_ffi
    finally:
        if hides_torch:
            del modules["torch"]
    return tvm_ffi


tvm_ffi = _import_without_torch()
