"""TIR's data types in GLSL: names, literals, conversions, and how long vectors are cut.

A TIR value of n lanes is a list of GLSL expressions, its pieces: vectors of four lanes, and one of
what is left over.

    float32     →  [float]
    float16x2   →  [f16vec2]
    uint8x10    →  [u8vec4, u8vec4, u8vec2]
"""

import math
import re
from dataclasses import dataclass

import numpy as np

_SCALARS = {
    "bool": ("bool", "bvec"),
    "int8": ("int8_t", "i8vec"),
    "uint8": ("uint8_t", "u8vec"),
    "int16": ("int16_t", "i16vec"),
    "uint16": ("uint16_t", "u16vec"),
    "int32": ("int", "ivec"),
    "uint32": ("uint", "uvec"),
    "int64": ("int64_t", "i64vec"),
    "uint64": ("uint64_t", "u64vec"),
    "float16": ("float16_t", "f16vec"),
    "float32": ("float", "vec"),
    "float64": ("double", "dvec"),
}
_DTYPE = re.compile(r"(bool|[a-z]+\d+)(?:x(\d+))?")
COMPONENTS = "xyzw"
_MAX_WIDTH = 4


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type by TVM's name, and a number of lanes."""

    scalar: str
    lanes: int = 1

    @staticmethod
    def parse(text: str) -> "DType | None":
        """From `float16x4`; None for a type that GLSL has no word for."""
        match = _DTYPE.fullmatch(text)
        if match is None or match[1] not in _SCALARS:
            return None
        return DType(match[1], int(match[2] or 1))

    @property
    def is_float(self) -> bool:
        return self.scalar.startswith("float")

    @property
    def is_bool(self) -> bool:
        return self.scalar == "bool"

    @property
    def is_small_int(self) -> bool:
        """Computed in 32 bits and cut: needs no 8-bit or 16-bit arithmetic of the device."""
        return self.scalar in ("int8", "uint8", "int16", "uint16")

    @property
    def bits(self) -> int:
        return 8 if self.is_bool else int(re.sub(r"\D", "", self.scalar))

    @property
    def widths(self) -> list[int]:
        """Lanes of each piece."""
        full, rest = divmod(self.lanes, _MAX_WIDTH)
        return [_MAX_WIDTH] * full + ([rest] if rest else [])

    def with_lanes(self, lanes: int) -> "DType":
        return DType(self.scalar, lanes)

    def with_scalar(self, scalar: str) -> "DType":
        return DType(scalar, self.lanes)

    def __str__(self) -> str:
        return self.scalar if self.lanes == 1 else f"{self.scalar}x{self.lanes}"


def glsl_name(scalar: str, width: int = 1) -> str:
    """`("float16", 4)` → `f16vec4`."""
    single, vector = _SCALARS[scalar]
    return single if width == 1 else f"{vector}{width}"


def literal(scalar: str, value: int | float | bool) -> str:
    """A constant of the type, exactly."""
    if scalar == "bool":
        return "true" if value else "false"
    if scalar.startswith("float"):
        return _float_literal(scalar, float(value))
    number = int(value)
    if scalar in ("int32", "int64"):
        suffix, bits = ("l", 64) if scalar == "int64" else ("", 32)
        if number == -(1 << (bits - 1)):
            return f"({number + 1}{suffix} - 1{suffix})"  # the positive number does not exist
        return f"{number}{suffix}" if number >= 0 else f"({number}{suffix})"
    if scalar in ("uint32", "uint64"):
        return f"{number}{'ul' if scalar == 'uint64' else 'u'}"
    return f"{glsl_name(scalar)}({number})"


def _float_literal(scalar: str, value: float) -> str:
    if scalar == "float16":
        value = float(np.float16(value))  # compilers may cut where this rounds
    if math.isnan(value):
        text = "uintBitsToFloat(0x7fc00000u)"
    elif math.isinf(value):
        text = f"uintBitsToFloat({'0x7f800000u' if value > 0 else '0xff800000u'})"
    elif scalar == "float64":
        return f"{value!r}lf" if value >= 0 else f"({value!r}lf)"
    else:
        text = repr(value) if math.copysign(1.0, value) > 0 else f"({value!r})"
    return text if scalar == "float32" else f"{glsl_name(scalar)}({text})"


def convert(text: str, source: str, target: str, width: int) -> str:
    """One piece to another scalar type, as C does."""
    return text if source == target else f"{glsl_name(target, width)}({text})"
