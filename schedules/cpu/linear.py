"""Linear layers over packed weights, for any number of tokens.

One parallel loop over (chunk of tokens, block of 16 rows) for all weights of a call together; a
unit of work takes its 16 rows through the tokens of the chunk in tiles. A chunk's activations fit
in the L2 cache, so that they stay there while the rows pass by.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from . import dot_int8
from .activation import activation_buffers, padded_k
from .byte_dots import BYTE_DOTS
from .control import either, for_tiles, parallel
from .dot_float import dot_float
from .isa import CpuIsa
from .kernel import Kernel, body, kernel, kernel_factory
from .linear_schedule import LinearSchedule, default_schedule
from .packing import PackedWeight
from .vectors import LANES, constant, exp2, local_array, ramp

Activations = Literal["int8", "mixed", "int16", "float32"]
"""How the inputs of quantized layers are rounded."""
TERMS: dict[Activations, dict[str, int]] = {
    "int8": {"attention": 1, "mlp": 1, "head": 1},
    "mixed": {"attention": 2, "mlp": 1, "head": 2},
    "int16": {"attention": 2, "mlp": 2, "head": 2},
}
"""Terms of int8 by the role of a layer (`relax_models/operators.py`); one that is not here takes
floats."""
Activation = Literal["silu", "gelu_tanh"]
_LOG2_E = 1.4426950408889634


def num_terms(
    weights: Sequence[PackedWeight], isa: CpuIsa, activations: Activations, role: str
) -> int:
    """int8 terms that a call over these weights takes its activations in; 0 for float32."""
    if activations not in TERMS or isa.byte_dot is None:
        return 0
    if not all(map(dot_int8.supports, weights)):
        return 0
    return TERMS[activations][role]


def linears(
    weights: Sequence[PackedWeight],
    biases: Sequence[bool],
    *,
    isa: CpuIsa,
    terms: int,
    residual: bool = False,
    schedule: LinearSchedule | None = None,
) -> tirx.PrimFunc:
    """(x, for each weight: packed, (bias [N]), (residual [m, N])) → [m, N] float32 of each.

    x is [m, K] float32, or with `terms` the three buffers of `quantize_activations`. A residual is
    for a single weight. Without a schedule it has the default one.
    """
    schedule = schedule or schedule_for(weights, isa, terms)
    return _linears(tuple(weights), tuple(biases), isa, terms, residual, schedule)


def gated_mlp(
    gate: PackedWeight,
    up: PackedWeight,
    activation: Activation,
    biases: Sequence[bool],
    *,
    isa: CpuIsa,
    terms: int,
    schedule: LinearSchedule | None = None,
) -> tirx.PrimFunc:
    """(x, gate packed, (gate bias), up packed, (up bias)) → activation(gate x) · (up x), [m, N].

    x and schedule as in `linears`.
    """
    schedule = schedule or schedule_for([gate, up], isa, terms)
    return _gated_mlp(gate, up, activation, tuple(biases), isa, terms, schedule)


def schedule_for(weights: Sequence[PackedWeight], isa: CpuIsa, terms: int) -> LinearSchedule:
    """The default schedule of a call over these weights."""
    is_quantized = any(weight.is_quantized for weight in weights)
    return default_schedule(isa, terms, is_quantized=is_quantized)


class _Layer:
    """A weight's arguments in a kernel under construction."""

    def __init__(
        self,
        func: Kernel,
        weight: PackedWeight,
        has_bias: bool,
        suffix: str,
        isa: CpuIsa,
        schedule: LinearSchedule,
    ) -> None:
        self.weight, self.isa, self.schedule = weight, isa, schedule
        self.packed = func.buffer(f"packed{suffix}", (weight.num_bytes,), "uint8")
        self.bias = func.buffer(f"bias{suffix}", (weight.n,), "float32") if has_bias else None

    def dot(self, block: Any, x: Any, first: Any, tokens: int) -> list[Any]:
        ahead = self.schedule.prefetch_bytes(tokens)
        if isinstance(x, dot_int8.Int8Activations):
            unit = BYTE_DOTS[self.isa.byte_dot or ""]
            return dot_int8.dot_int8(self.weight, self.packed, block, x, first, tokens, unit, ahead)
        chains = self.isa.chains
        return dot_float(self.weight, self.packed, block, x, first, tokens, chains, ahead)

    def bias_vector(self, block: Any) -> Any:
        """The bound bias of a block of 16 rows; None without one."""
        if self.bias is None:
            return None
        bias, n = self.bias, self.weight.n
        if n % LANES == 0:
            return B.Bind(bias[ramp(block * LANES)])
        vector = local_array(LANES)
        B.buffer_store(vector, constant(0.0), [ramp(0)])
        with B.serial(T.min(T.int64(LANES), n - block * LANES)) as lane:
            B.buffer_store(vector, bias[block * LANES + lane], [lane])
        return B.Bind(vector[ramp(0)])


@kernel_factory
def _linears(
    weights: tuple[PackedWeight, ...],
    biases: tuple[bool, ...],
    isa: CpuIsa,
    terms: int,
    residual: bool,
    schedule: LinearSchedule,
) -> tirx.PrimFunc:
    if residual and len(weights) != 1:
        raise ValueError("a residual is for a single weight")
    name = _name("linears", weights, biases, isa, terms, residual, schedule)
    with kernel(name) as (func, ib):
        x = _declare_x(func, weights[0].k, terms)
        layers = [
            _Layer(func, weight, has_bias, str(i), isa, schedule)
            for i, (weight, has_bias) in enumerate(zip(weights, biases, strict=True))
        ]
        m = "num_tokens"
        added = func.buffer("residual", (m, weights[0].n), "float32") if residual else None
        outputs = [
            func.buffer(f"y{i}", (m, weight.n), "float32") for i, weight in enumerate(weights)
        ]

        def emit(i: int, block: Any, start: Any, stop: Any) -> None:
            layer = layers[i]
            bias = layer.bias_vector(block)

            def emit_tile(first: Any, tokens: int) -> None:
                values = layer.dot(block, x, first, tokens)
                if bias is not None:
                    values = [value + bias for value in values]
                _store(outputs[i], block, first, values, added)

            for_tiles(start, stop, schedule.tiles, emit_tile)

        with body():
            _for_blocks(func.size(m), weights, terms, schedule, emit)
    return ib.get()


@kernel_factory
def _gated_mlp(
    gate: PackedWeight,
    up: PackedWeight,
    activation: Activation,
    biases: tuple[bool, ...],
    isa: CpuIsa,
    terms: int,
    schedule: LinearSchedule,
) -> tirx.PrimFunc:
    name = _name("gated_mlp", (gate, up), biases, isa, terms, activation, schedule)
    with kernel(name) as (func, ib):
        x = _declare_x(func, gate.k, terms)
        layers = [
            _Layer(func, weight, has_bias, suffix, isa, schedule)
            for weight, has_bias, suffix in zip((gate, up), biases, ("_gate", "_up"), strict=True)
        ]
        y = func.buffer("y", ("num_tokens", gate.n), "float32")

        def emit(_: int, block: Any, start: Any, stop: Any) -> None:
            bias_vectors = [layer.bias_vector(block) for layer in layers]

            def emit_tile(first: Any, tokens: int) -> None:
                both = []
                for layer, bias in zip(layers, bias_vectors, strict=True):
                    values = layer.dot(block, x, first, tokens)
                    both.append([B.Bind(v if bias is None else v + bias) for v in values])
                gated = [_activate(g, activation) * u for g, u in zip(*both, strict=True)]
                _store(y, block, first, gated, None)

            for_tiles(start, stop, schedule.tiles, emit_tile)

        with body():
            _for_blocks(func.size("num_tokens"), (gate,), terms, schedule, emit)
    return ib.get()


def _name(kind: str, weights: tuple[PackedWeight, ...], *rest: Any) -> str:
    """A readable name, unique by content."""
    digest = hashlib.sha256(repr((kind, weights, rest)).encode()).hexdigest()[:8]
    sizes = "_".join(str(weight.n) for weight in weights)
    return f"{kind}_{weights[0].layout_key}_{sizes}x{weights[0].k}_{digest}"


def _declare_x(func: Kernel, k: int, terms: int) -> Any:
    if not terms:
        return func.buffer("x", ("num_tokens", k), "float32")
    xq, scales, sums = activation_buffers(k, "num_tokens", terms)
    return dot_int8.Int8Activations(
        func.buffer("xq", *xq), func.buffer("scales", *scales), func.buffer("sums", *sums), terms
    )


def _for_blocks(
    num_tokens: Any,
    weights: Sequence[PackedWeight],
    terms: int,
    schedule: LinearSchedule,
    emit: Callable[[int, Any, Any, Any], None],
) -> None:
    """`emit(weight number, block, first token, last token + 1)` for every unit, in parallel."""
    token_bytes = terms * padded_k(weights[0].k) if terms else 4 * weights[0].k
    tile = schedule.tile_tokens
    chunk = max(1, schedule.chunk_bytes // (token_bytes * tile)) * tile
    num_blocks = sum(weight.num_blocks for weight in weights)
    # Chunks of about one size: threads take equal shares of the units.
    num_chunks = B.Bind((num_tokens + (chunk - 1)) // chunk)
    per_chunk = (num_tokens + num_chunks - 1) // num_chunks
    size = B.Bind((per_chunk + (tile - 1)) // tile * tile)
    with parallel(num_chunks * num_blocks) as unit:
        start = B.Bind(T.min(num_tokens, unit // num_blocks * size))
        stop = B.Bind(T.min(num_tokens, start + size))
        block = B.Bind(unit % num_blocks)

        def choose(i: int, first: int) -> None:
            last = first + weights[i].num_blocks
            if i == len(weights) - 1:
                emit(i, B.Bind(block - first), start, stop)
                return
            with either(block < last) as (this, others):
                with this:
                    emit(i, B.Bind(block - first), start, stop)
                with others:
                    choose(i + 1, last)

        choose(0, 0)


def _activate(value: Any, activation: Activation) -> Any:
    """SiLU, or GELU by its tanh approximation; both are value · sigmoid(something)."""
    inner = value
    if activation == "gelu_tanh":
        # (1 + tanh t) / 2 = sigmoid(2 t), t = √(2/π) · (v + 0.044715 v³)
        cubic = value + constant(0.044715) * value * value * value
        inner = constant(2 * 0.7978845608028654) * cubic
    power = exp2(T.min(inner * constant(-_LOG2_E), constant(126.0)))
    return value / (constant(1.0) + power)


def _store(y: Any, block: Any, first: Any, values: list[Any], added: Any) -> None:
    """Write 16 rows of W for each token, (plus `added`); lanes beyond N are dropped."""
    n = int(y.shape[1])

    def store_vectors() -> None:
        at = ramp(block * LANES)
        for i, value in enumerate(values):
            result = value if added is None else added[first + i, at] + value
            B.buffer_store(y, result, [first + i, at])

    def store_lanes() -> None:
        scratch = local_array(len(values) * LANES)
        for i, value in enumerate(values):
            B.buffer_store(scratch, value, [ramp(i * LANES)])
        with B.serial(T.int64(len(values))) as i, B.serial(T.int64(n % LANES)) as lane:
            column = T.int64(n // LANES * LANES) + lane
            result = scratch[i * LANES + lane]
            if added is not None:
                result = added[first + i, column] + result
            B.buffer_store(y, result, [first + i, column])

    if n % LANES == 0:
        store_vectors()
        return
    with either(block < n // LANES) as (whole, partial):
        with whole:
            store_vectors()
        with partial:
            store_lanes()
