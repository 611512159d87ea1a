"""Import `tvm_ffi`, and nothing else: it would load torch if that is installed (2 s, 300 MB)."""

import sys
from types import ModuleType
from typing import Any


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
