"""Keep float constants exact in code generators that print kernels as source.

TVM prints float32 with seven digits, which name the nearest float32 of about one in two constants:

    x * T.float32(0.15915494)        // printed 1.591549e-01f, another number
    x * T.reinterpret("float32", T.uint32(0x3E22F983))     // afterwards: its bits
"""

import math
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

_PRINTED = ("cuda", "metal", "opencl")
"""Kinds of TVM targets whose kernels are source text."""


@tirx.transform.prim_func_pass(opt_level=0)
def keep_constants_exact(
    func: tirx.PrimFunc, _: tvm.IRModule, __: tvm.transform.PassContext
) -> tirx.PrimFunc:
    """Write float32 constants that seven digits do not name as the bits that they are."""
    target = (func.attrs or {}).get("target")
    if target is None or target.kind.name not in _PRINTED:
        return func
    return tvm_ffi.structural_map(func, (tirx.FloatImm, _exact))


def _exact(constant: tirx.FloatImm) -> Any:
    value = float(constant.value)
    if str(constant.ty) != "float32" or not math.isfinite(value):
        return constant  # seven digits name every float16
    single = np.float32(value)
    if np.float32(f"{value:.6e}") == single:
        return constant
    return tirx.reinterpret("float32", tirx.IntImm("uint32", int(single.view(np.uint32))))
