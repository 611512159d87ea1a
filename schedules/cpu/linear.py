"""Linear layers over packed weights, for any number of tokens.

One parallel loop over (chunk of tokens, block of 16 rows) for all weights of a call together; a
unit of work takes its 16 rows through the tokens of the chunk in tiles. A chunk's activations fit
in the L2 cache, so that they stay there while the rows pass by. Where batches have tiles of two
blocks (`LinearSchedule.pair_tokens`), neighbours make one unit.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

from . import dot_bf16, dot_int8
from .byte_dots import BYTE_DOTS
from .control import either, for_tiles, parallel
from .int8_activations import Int8Activations
from .isa import CpuIsa
from .kernel import Kernel, body, kernel, kernel_factory
from .linear_inputs import activation_specs, activation_starts, are_bfloat16
from .linear_layer import Layer, dot_blocks_many, many_tokens, unless_many, unless_unpacked
from .linear_schedule import LinearSchedule, default_schedule
from .packing import PackedWeight
from .vectors import LANES, constant, exp2, local_array, opaque, ramp
from .weight_groups import UnpackedBlock

Activation = Literal["silu", "gelu_tanh"]
_LOG2_E = 1.4426950408889634


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

    x is [m, K] float32, or with `terms` the buffers of `linear_inputs.activation_terms`. A residual
    is for a single weight. Without a schedule it has the default one.
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
    terms = _terms_at_once(weights, terms)
    # Two blocks of bytes are too much for an L1 cache.
    has_pairs = all(weight.is_nibbles for weight in weights)
    return default_schedule(
        isa,
        terms,
        is_quantized=is_quantized,
        has_pairs=has_pairs,
        has_many=all(map(dot_int8.supports, weights)),
        # Of two planes each is a stream of its own, the upper one a little larger.
        block_bytes=max((w.upper if w.planes else w).block_bytes for w in weights),
    )


def _terms_at_once(weights: Sequence[PackedWeight], terms: int) -> int:
    """Terms that a tile's sums are of. Of int8 the low ones come after the high ones, and few."""
    return terms if are_bfloat16(weights) else min(terms, 1)


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
        x = declare_x(func, weights, terms, isa)
        layers = [
            Layer(func, weight, has_bias, str(i), isa, schedule)
            for i, (weight, has_bias) in enumerate(zip(weights, biases, strict=True))
        ]
        m = "num_tokens"
        added = func.buffer("residual", (m, weights[0].n), "float32") if residual else None
        outputs = [
            func.buffer(f"y{i}", (m, weight.n), "float32") for i, weight in enumerate(weights)
        ]

        def emit(i: int, block: Any, count: Any, start: Any, stop: Any) -> None:
            layer, batch = layers[i], (start, stop)

            def store(block: Any, first: Any, values: list[Any]) -> None:
                bias = layer.bias_vector(block)
                if bias is not None:
                    values = [value + bias for value in values]
                store_rows(outputs[i], block, first, values, added)

            def emit_pair(first: Any, tokens: int) -> None:
                # Without a neighbour, the block itself once more.
                both = [block, opaque(block + count - 1)]
                results = layer.dot_pair(block, layer, both[1], x, first, tokens, batch)
                for number, values in zip(both, results, strict=True):
                    store(number, first, values)

            def emit_tile(first: Any, tokens: int) -> None:
                if not schedule.least_paired:
                    store(block, first, layer.dot(block, x, first, tokens, batch))
                    return
                with B.serial(count) as j:
                    number = opaque(block + j)
                    store(number, first, layer.dot(number, x, first, tokens, batch))

            def emit_unpacked(first: Any, tokens: int, unpacked: list[UnpackedBlock]) -> None:
                store(block, first, dot_int8.dot_unpacked(unpacked[0], x, first, tokens))

            def emit_many(first: Any, tokens: Any) -> None:
                both = [block, opaque(block + count - 1)]

                def store_both(token: Any, values: list[Any]) -> None:
                    for number, value in zip(both, values, strict=True):
                        store(number, token, [value])

                blocks = [(layer, number) for number in both]
                dot_blocks_many(blocks, x, first, tokens, store_both)

            with unless_unpacked([layer], block, x, start, stop, emit_unpacked):
                with unless_many(many_tokens([layer], x), start, stop, emit_many):
                    for_pairs_and_tiles(start, stop, schedule, emit_pair, emit_tile)

        with body(llvm_source(x, isa)):
            for_blocks(func.size(m), weights, terms, schedule, emit, have_neighbours=True)
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
        x = declare_x(func, (gate, up), terms, isa)
        layers = [
            Layer(func, weight, has_bias, suffix, isa, schedule)
            for weight, has_bias, suffix in zip((gate, up), biases, ("_gate", "_up"), strict=True)
        ]
        y = func.buffer("y", ("num_tokens", gate.n), "float32")

        def emit(_: int, block: Any, count: Any, start: Any, stop: Any) -> None:
            batch = start, stop
            bias_vectors = [layer.bias_vector(block) for layer in layers]

            def store(first: Any, results: list[list[Any]]) -> None:
                both = [
                    [B.Bind(v if bias is None else v + bias) for v in values]
                    for values, bias in zip(results, bias_vectors, strict=True)
                ]
                gated = [_activate(g, activation) * u for g, u in zip(*both, strict=True)]
                store_rows(y, block, first, gated, None)

            def emit_pair(first: Any, tokens: int) -> None:
                results = layers[0].dot_pair(block, layers[1], block, x, first, tokens, batch)
                store(first, results)

            def emit_tile(first: Any, tokens: int) -> None:
                store(first, [layer.dot(block, x, first, tokens, batch) for layer in layers])

            def emit_unpacked(first: Any, tokens: int, unpacked: list[UnpackedBlock]) -> None:
                store(first, [dot_int8.dot_unpacked(each, x, first, tokens) for each in unpacked])

            def emit_many(first: Any, tokens: Any) -> None:
                def store_gated(token: Any, values: list[Any]) -> None:
                    store(token, [[value] for value in values])

                blocks = [(layer, block) for layer in layers]
                dot_blocks_many(blocks, x, first, tokens, store_gated)

            with unless_unpacked(layers, block, x, start, stop, emit_unpacked):
                with unless_many(many_tokens(layers, x), start, stop, emit_many):
                    for_pairs_and_tiles(start, stop, schedule, emit_pair, emit_tile)

        with body(llvm_source(x, isa)):
            for_blocks(func.size("num_tokens"), (gate,), terms, schedule, emit)
    return ib.get()


def _name(kind: str, weights: tuple[PackedWeight, ...], *rest: Any) -> str:
    """A readable name, unique by content."""
    digest = hashlib.sha256(repr((kind, weights, rest)).encode()).hexdigest()[:8]
    sizes = "_".join(str(weight.n) for weight in weights)
    return f"{kind}_{weights[0].layout_key}_{sizes}x{weights[0].k}_{digest}"


def declare_x(func: Kernel, weights: Sequence[PackedWeight], terms: int, isa: CpuIsa) -> Any:
    """The arguments of a kernel that are x, as the dot products take them."""
    specs = activation_specs(weights, "num_tokens", terms)
    names = ("x",) if len(specs) == 1 else ("groups", "halves", "kept")[: len(specs)]
    buffers = [func.buffer(name, *spec) for name, spec in zip(names, specs, strict=True)]
    if not terms:
        return buffers[0]
    if are_bfloat16(weights):
        return dot_bf16.Bf16Activations(buffers[0], terms)
    groups, halves, *kept = buffers
    starts = activation_starts(weights, isa)
    return Int8Activations(groups, halves, kept[0] if kept else None, starts)


def llvm_source(x: Any, isa: CpuIsa) -> str:
    """LLVM IR that a kernel over these activations imports."""
    if isinstance(x, dot_bf16.Bf16Activations):
        return dot_bf16.LLVM_SOURCE
    if isinstance(x, Int8Activations):
        return BYTE_DOTS[isa.byte_dot or ""].llvm_source
    return ""


def for_blocks(
    num_tokens: Any,
    weights: Sequence[PackedWeight],
    terms: int,
    schedule: LinearSchedule,
    emit: Callable[[int, Any, Any, Any, Any], None],
    *,
    have_neighbours: bool = False,
) -> None:
    """`emit(weight number, first block, number of blocks, first token, last token + 1)` for every
    unit, in parallel. With `have_neighbours` units of large batches have two blocks."""
    shape, _ = activation_specs(weights, 1, _terms_at_once(weights, terms))[0]
    token_bytes = 4 * math.prod(shape)
    tile = schedule.pair_tokens or schedule.tile_tokens
    chunk = max(1, schedule.chunk_bytes // (token_bytes * tile)) * tile
    # Chunks of about one size: threads take equal shares of the units.
    num_chunks = B.Bind((num_tokens + (chunk - 1)) // chunk)
    per_chunk = (num_tokens + num_chunks - 1) // num_chunks
    size = B.Bind((per_chunk + (tile - 1)) // tile * tile)
    step: Any = T.int64(1)
    if have_neighbours and schedule.least_paired:
        has_pairs = num_tokens >= schedule.least_paired
        step = opaque(T.if_then_else(has_pairs, T.int64(2), T.int64(1)))
    num_units = [B.Bind((weight.num_blocks + (step - 1)) // step) for weight in weights]
    units_of_all = opaque(sum(num_units[1:], num_units[0]))
    with parallel(num_chunks * units_of_all) as unit:
        start = opaque(T.min(num_tokens, unit // units_of_all * size))
        stop = opaque(T.min(num_tokens, start + size))
        number = B.Bind(unit % units_of_all)

        def choose(i: int, number: Any) -> None:
            def emit_this() -> None:
                block = opaque(number * step)
                count = opaque(T.min(step, weights[i].num_blocks - block))
                emit(i, block, count, start, stop)

            if i == len(weights) - 1:
                emit_this()
                return
            with either(number < num_units[i]) as (this, others):
                with this:
                    emit_this()
                with others:
                    choose(i + 1, B.Bind(number - num_units[i]))

        choose(0, number)


def for_pairs_and_tiles(
    start: Any,
    stop: Any,
    schedule: LinearSchedule,
    emit_pair: Callable[[Any, int], None],
    emit_tile: Callable[[Any, int], None],
) -> None:
    """`emit_pair(first, size)` for as many tiles of two blocks as fit, `emit_tile` for the rest."""
    size = schedule.pair_tokens
    if size:
        count = stop - start
        num_pairs = T.if_then_else(count >= schedule.least_paired, count // size, T.int64(0))
        num_pairs = opaque(num_pairs)
        with B.serial(num_pairs) as tile:
            emit_pair(opaque(start + tile * size), size)
        start = opaque(start + num_pairs * size)
    for_tiles(start, stop, schedule.tiles, emit_tile)


def _activate(value: Any, activation: Activation) -> Any:
    """SiLU, or GELU by its tanh approximation; both are value · sigmoid(something)."""
    inner = value
    if activation == "gelu_tanh":
        # (1 + tanh t) / 2 = sigmoid(2 t), t = √(2/π) · (v + 0.044715 v³)
        cubic = value + constant(0.044715) * value * value * value
        inner = constant(2 * 0.7978845608028654) * cubic
    power = exp2(T.min(inner * constant(-_LOG2_E), constant(126.0)))
    return value / (constant(1.0) + power)


def store_rows(y: Any, block: Any, first: Any, values: list[Any], added: Any) -> None:
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
