"""How weights are stored: schemes by name, packing, rounding, and GGUF's blocks."""

from .gguf_blocks import format_for, import_blocks
from .group import cast_float, dequantize, quantize
from .scheme import (
    DEFAULT_SCHEME,
    SCHEMES,
    QuantScheme,
    Role,
    bits_per_weight,
    find_scheme,
    formats_for,
    num_bytes,
)

__all__ = [
    "DEFAULT_SCHEME",
    "SCHEMES",
    "QuantScheme",
    "Role",
    "bits_per_weight",
    "cast_float",
    "dequantize",
    "find_scheme",
    "format_for",
    "formats_for",
    "import_blocks",
    "num_bytes",
    "quantize",
]
