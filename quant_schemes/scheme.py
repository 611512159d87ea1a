"""The quantization schemes by name, and what a scheme does to a model's weights."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import CompileError
from ..artifact.tensor_format import TensorFormat
from .rounding import Rounding

Role = Literal["linear", "embedding", "head"]


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How the weights of a float checkpoint are stored.

    `dtype` is that of everything which is not a matrix (norms, biases) and of activations;
    `rounding` holds for every quantized weight.
    """

    name: str
    description: str
    linear: TensorFormat
    embedding: TensorFormat
    head: TensorFormat
    dtype: Literal["float32", "float16", "bfloat16"]
    rounding: Rounding

    def format_of(self, role: Role) -> TensorFormat:
        return {"linear": self.linear, "embedding": self.embedding, "head": self.head}[role]


_F32, _F16, _BF16 = TensorFormat("float32"), TensorFormat("float16"), TensorFormat("bfloat16")
_Q3 = TensorFormat("float16", 3, 40, zero_point=3)
_Q4 = TensorFormat("float16", 4, 32, zero_point=7)
_Q4_KN = TensorFormat("float16", 4, 32, zero_point=7, layout="KN")
_Q4_F32 = TensorFormat("float32", 4, 32, zero_point=7)
_Q8 = TensorFormat("float16", 8, 32, zero_point=127)
_A4 = TensorFormat("float16", 4, 32)
_A5 = TensorFormat("float16", 5, 32)

# Names and formats of the q0 and `_0` to `_2` entries are MLC-LLM's (mlc_llm/quantization/
# quantization.py); an embedding is looked up by row, so it is NK there even where linears are KN.
# "e8": 8-bit embedding and head; "q4a": affine, a scale and a minimum per group.
_Entry = tuple[str, TensorFormat, TensorFormat, TensorFormat, Rounding]
_TABLE: dict[str, _Entry] = {
    "q0f32": ("float32 as in the checkpoint", _F32, _F32, _F32, "mlc"),
    "q0f16": ("float16", _F16, _F16, _F16, "mlc"),
    "q0bf16": ("bfloat16", _BF16, _BF16, _BF16, "mlc"),
    "q3f16_1": ("3 bits, groups of 40", _Q3, _Q3, _Q3, "mlc"),
    "q4f16_0": ("4 bits, linears stored K x N", _Q4_KN, _Q4, _Q4_KN, "mlc"),
    "q4f16_1": ("4 bits", _Q4, _Q4, _Q4, "mlc"),
    "q4f16_2": ("4 bits, embedding and head float16", _Q4, _F16, _F16, "mlc"),
    "q4f32_1": ("4 bits, float32 scales", _Q4_F32, _Q4_F32, _Q4_F32, "mlc"),
    "q8f16_1": ("8 bits", _Q8, _Q8, _Q8, "mlc"),
    "q4f16_e8": ("4 bits, searched scales, 8-bit embedding and head", _Q4, _Q8, _Q8, "searched"),
    "q4af16_e8": ("4 bits affine, searched, 8-bit embedding and head", _A4, _Q8, _Q8, "searched"),
    "q5af16_e8": ("5 bits affine, searched, 8-bit embedding and head", _A5, _Q8, _Q8, "searched"),
}

SCHEMES: dict[str, QuantScheme] = {
    name: QuantScheme(name, description, linear, embedding, head, linear.dtype, rounding)
    for name, (description, linear, embedding, head, rounding) in _TABLE.items()
}

DEFAULT_SCHEME = "q4af16_e8"
"""What a float checkpoint gets when no scheme is named.

Affine: its mean loss over three real models is a little below that of `q4f16_e8`, and far below
where the loss is largest, for half a bit more in linear layers (figures: docs/quantization.md).
"""


def find_scheme(name: str) -> QuantScheme:
    """The scheme called `name`; CompileError with the nearest names if there is none."""
    scheme = SCHEMES.get(name)
    if scheme is not None:
        return scheme
    nearest = difflib.get_close_matches(name.lower(), SCHEMES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known: {', '.join(SCHEMES)}"
    raise CompileError(f"unknown quantization '{name}'; {hint}")


def formats_for(
    scheme: QuantScheme, weights: Iterable[tuple[str, Role]]
) -> dict[str, TensorFormat]:
    """The format of each named weight. A tied weight may come twice, as embedding and as head:
    the embedding's format is taken."""
    formats: dict[str, TensorFormat] = {}
    embeddings: set[str] = set()
    for name, role in weights:
        if role == "embedding":
            embeddings.add(name)
        elif name in embeddings:
            continue
        formats[name] = scheme.format_of(role)
    return formats


def num_bytes(fmt: TensorFormat, n: int, k: int) -> int:
    """Bytes of all parts of a [n, k] weight."""
    return sum(
        math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in fmt.parts(n, k).values()
    )


def bits_per_weight(
    formats: Mapping[str, TensorFormat], shapes: Mapping[str, tuple[int, int]]
) -> float:
    """Stored bits per weight over all matrices of `shapes` (name → [n, k]); padding, scales and
    minima count as stored bits."""
    num_weights = sum(n * k for n, k in shapes.values())
    total = sum(num_bytes(formats[name], n, k) for name, (n, k) in shapes.items())
    return 8 * total / num_weights
