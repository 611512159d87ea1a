import numpy as np
import pytest
import tvm
from everycast.artifact.packed_layout import packed_offsets
from everycast.schedules.cpu import one_region as module_under_test
from everycast.schedules.cpu.kernel import Subroutine
from everycast.schedules.cpu.one_region import Step, Value, View, one_region
from everycast.schedules.passes.lower_operators import lower_operators
from everycast.schedules.pipeline import SUBROUTINE, with_upper_bounds
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, tirx

TOKENS, ROWS = tirx.Var("num_tokens", "int64"), tirx.Var("num_rows", "int64")
SIZES = {TOKENS: 5, ROWS: 3, None: 1}
USES = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=3), st.integers(1, 3)), min_size=1, max_size=12
)
"""For each step: which earlier values it reads, and how many it makes."""


def const(value):
    return tirx.const(value, "int64")


def steps_of(uses, shapes):
    """Steps over temporaries, each step an epoch of its own."""
    values: list[Value] = []
    steps = []
    for epoch, (reads, num_made) in enumerate(uses):
        read = [values[i % len(values)] for i in reads] if values else []
        made = [Value(next(shapes), "float32") for _ in range(num_made)]
        values += made
        for value in (*read, *made):
            value.last_epoch = epoch
        views = [View(value, value.shape) for value in (*read, *made)]
        part = Subroutine(None, ())
        steps.append(Step(f"step{epoch}", part, views, [], set(made), epoch))
    return steps


def bytes_of(expr):
    """The sum of products with `SIZES` for its symbols."""
    if isinstance(expr, tirx.Var):
        return SIZES[expr]
    if isinstance(expr, tirx.Add):
        return bytes_of(expr.a) + bytes_of(expr.b)
    if isinstance(expr, tirx.Mul):
        return bytes_of(expr.a) * bytes_of(expr.b)
    return int(expr)


@given(USES, st.randoms(use_true_random=False))
def test_values_that_live_together_share_no_byte(uses, random):
    def shapes():
        while True:
            width = const(random.randrange(1, 100))
            size = random.choice([TOKENS, ROWS, TOKENS * const(3), const(2)])
            yield (size, width)

    steps = steps_of(uses, shapes())
    workspace = module_under_test._Workspace(steps)
    first = {}
    for step in steps:
        for view in step.tensors:
            first.setdefault(view.value, step.epoch)
    places = []
    for value, epoch in first.items():
        start = bytes_of(workspace.place(value))
        size, per_unit = value.unit()
        places.append((start, start + per_unit * SIZES[size], epoch, value.last_epoch))
        assert start % 64 == 0
    end = bytes_of(workspace.num_bytes)
    for i, (start, stop, begin, last) in enumerate(places):
        assert workspace.num_lines * 64 <= start < stop <= end
        for other_start, other_stop, other_begin, other_last in places[:i]:
            if begin <= other_last and other_begin <= last:
                assert stop <= other_start or other_stop <= start


@pytest.mark.parametrize("shape", [(TOKENS, ROWS), (TOKENS + const(1), const(2))])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="not a multiple of one symbolic size"):
        Value(shape, "float32").unit()


def test_a_region_computes_what_its_kernels_do(tiny):
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    region = one_region(lowered, is_arm="aarch64" in str(tiny.target))
    assert region.in_one_buffer and not lowered.in_one_buffer
    names = {variable.name_hint for variable in region.module.functions}
    assert {"forward", "logits", "forward_region", "logits_region"} <= names
    parts = [f for f in region.module.functions.values() if SUBROUTINE in (f.attrs or {})]
    assert len(parts) == 5  # embedding, norm, gated MLP, down; the head: the norm is shared
    bounds = {"num_tokens": 16}
    plain = tiny.compile(with_upper_bounds(lowered.module, bounds))
    vm = tiny.compile(with_upper_bounds(region.module, bounds))
    packed = []
    for parameter in lowered.parameters:
        sources = [tiny.tensors[name] for name in parameter.sources]
        packed.append(plain[parameter.pack](*sources) if parameter.pack else sources[0])
    offsets, num_bytes = packed_offsets([parameter.num_bytes for parameter in lowered.parameters])
    weights = np.zeros(num_bytes, np.uint8)
    for offset, tensor in zip(offsets, packed, strict=True):
        data = tensor.numpy().reshape(-1).view(np.uint8)
        weights[offset : offset + len(data)] = data
    buffer = tvm.runtime.tensor(weights)
    for count in (3, 16, 1, 8):
        ids = tvm.runtime.tensor(np.arange(count, dtype="int32"))
        hidden = plain["forward"](ids, *packed)
        np.testing.assert_array_equal(vm["forward"](ids, buffer).numpy(), hidden.numpy())
        expected = plain["logits"](hidden, *packed).numpy()
        np.testing.assert_array_equal(vm["logits"](hidden, buffer).numpy(), expected)


def test_an_operator_without_a_kernel_cannot_be_part_of_one(tiny):
    x = relax.Var("x", relax.TensorType([TOKENS, 8], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("forward", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.op.nn.silu(x)))
        builder.emit_func_output(result)
    lowered = lower_operators(tiny.module, tiny.names, tiny.handlers)
    lowered.module, lowered.parameters = builder.get(), []
    with pytest.raises(ValueError, match=r"relax.nn.silu cannot be a part"):
        one_region(lowered, is_arm=False)
