"""Names of element types as the artifact's files spell them, and their NumPy dtypes."""

import ml_dtypes
import numpy as np

_NUMPY_DTYPES: dict[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    },
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of an element type such as `float16` or `bfloat16`; ValueError if unknown."""
    try:
        return _NUMPY_DTYPES[name]
    except KeyError:
        known = ", ".join(_NUMPY_DTYPES)
        raise ValueError(f"unknown element type '{name}'; known: {known}") from None


def largest_finite(name: str) -> float:
    """The largest number of a float type: 65504 for `float16`."""
    return float(ml_dtypes.finfo(numpy_dtype(name)).max)  # type: ignore[no-untyped-call]


def dtype_name(dtype: np.dtype) -> str:
    """The name of a NumPy dtype, whatever its byte order; ValueError if files cannot hold it."""
    try:
        return _NAMES[dtype.newbyteorder("=")]
    except KeyError:
        known = ", ".join(_NUMPY_DTYPES)
        raise ValueError(f"element type '{dtype}' cannot be stored; known: {known}") from None
