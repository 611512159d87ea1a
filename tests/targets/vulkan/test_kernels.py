"""Statements, memory, threads and subgroups of kernels, on a device, against NumPy."""

from typing import Any

import numpy as np
import pytest
import tvm
from everycast.artifact.errors import CompileError
from everycast.targets.vulkan.kernel import write_kernel
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

RNG = np.random.default_rng(3)


def source_of(module: Any) -> str:
    """The GLSL of all kernels of a compiled function."""
    found, todo = [], [module.mod if hasattr(module, "mod") else module]
    while todo:
        part = todo.pop()
        todo += list(part.imports)
        if part.kind == "vulkan":
            found.append(str(part.inspect_source("")))
    return "".join(found)


def test_loops_conditions_and_variables(run, kernel) -> None:
    """Collatz steps, by a while loop with break and continue in a for loop around it."""

    def body(buffers, _, indices):
        start, out = buffers
        state = B.alloc_buffer((2,), "int32", scope="local")
        i = indices[0]
        B.buffer_store(state, start[i], [0])
        B.buffer_store(state, T.int32(0), [1])
        with B.While(state[0] != 1):
            value = B.Bind(state[0])
            B.buffer_store(state, state[1] + 1, [1])
            with B.If(value % 2 == 0):
                with B.Then():
                    B.buffer_store(state, value // 2, [0])
                with B.Else():
                    B.buffer_store(state, value * 3 + 1, [0])
            with B.If(state[1] >= 50), B.Then():
                B.evaluate(T.break_loop())
        with B.serial(10) as n:
            with B.If(n == 3), B.Then():
                B.evaluate(T.continue_loop())
            B.buffer_store(state, state[1] + n, [1])
        with B.unroll(3) as n:
            B.buffer_store(state, state[1] + n, [1])
        B.buffer_store(out, state[1], [i])

    numbers = np.arange(1, 33, dtype=np.int32)
    out = np.zeros(32, np.int32)
    shapes = [((32,), "int32")] * 2
    run(kernel("collatz", shapes, body, sizes=[("threadIdx.x", 32)]), numbers, out)

    def steps(value: int) -> int:
        count = 0
        while value != 1 and count < 50:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            count += 1
        return count + 45 - 3 + 3

    assert out.tolist() == [steps(int(n)) for n in numbers]


def test_conditions_guard_what_they_guard(run, kernel) -> None:
    """Neither the other branch, nor the right side of `and`, reads beyond an end."""
    size = 50

    def body(buffers, _, indices):
        source, index, out = buffers
        i = indices[0] * 64 + indices[1]
        with B.If(i < size), B.Then():
            j = B.Bind(index[i])
            inside = tirx.all(j >= 0, j < size)
            value = T.if_then_else(inside, source[j], T.float32(-1))
            is_big = tirx.all(inside, T.if_then_else(inside, source[j], T.float32(0)) > 0.5)
            B.buffer_store(out, value + T.Cast("float32", is_big), [i])

    source = RNG.random(size).astype(np.float32)
    index = RNG.integers(-1000, 1000, size).astype(np.int32)
    index[::3] %= size
    out = np.zeros(size, np.float32)
    shapes = [((size,), "float32"), ((size,), "int32"), ((size,), "float32")]
    func = kernel("guards", shapes, body, sizes=[("blockIdx.x", 2), ("threadIdx.x", 64)])
    run(func, source, index, out)
    inside = (index >= 0) & (index < size)
    value = np.where(inside, source[np.clip(index, 0, size - 1)], -1)
    np.testing.assert_allclose(out, value + (inside & (value > 0.5)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint32", "bool"])
@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_vectors_that_are_aligned_are_one_access(
    run, kernel, compiled, dtype: str, lanes: int
) -> None:
    def body(buffers, _, indices):
        start = (indices[0] * 8 + indices[1]) * lanes
        B.buffer_store(buffers[1], buffers[0].vload([T.Ramp(start, 1, lanes)]), [
            T.Ramp(start, 1, lanes)
        ])  # fmt: skip

    size = 32 * lanes
    func = kernel(
        "copy", [((size,), dtype)] * 2, body, sizes=[("blockIdx.x", 4), ("threadIdx.x", 8)]
    )
    module = compiled(func)
    width = min(lanes, 4)
    assert f"vec{width} b0_" in source_of(module)
    given = RNG.integers(0, 2 if dtype == "bool" else 100, size).astype(dtype)
    out = np.zeros(size, dtype)
    run(module["copy"], given, out)
    np.testing.assert_array_equal(out, given)


def test_vectors_that_are_not_aligned(run, kernel) -> None:
    """An odd start, a stride, an index of vectors, and a value that overlaps its source."""

    def body(buffers, scalars, indices):
        source, out, table = buffers
        i = indices[0] * 12
        B.buffer_store(out, source.vload([T.Ramp(i + scalars[0], 1, 4)]), [T.Ramp(i, 1, 4)])
        B.buffer_store(out, source.vload([T.Ramp(i, 3, 4)]), [T.Ramp(i + 4, 1, 4)])
        gathered = source.vload([table.vload([T.Ramp(indices[0] * 4, 1, 4)])])
        B.buffer_store(out, gathered, [T.Ramp(i + 11, -1, 4)])
        B.buffer_store(out, out.vload([T.Ramp(i, 1, 4)]), [T.Ramp(i + 1, 1, 4)])

    source = RNG.random(64).astype(np.float32)
    table = RNG.integers(0, 64, 16).astype(np.int32)
    out = np.zeros(48, np.float32)
    shapes = [((64,), "float32"), ((48,), "float32"), ((16,), "int32")]
    func = kernel("odd", shapes, body, sizes=[("threadIdx.x", 4)], scalars=["int64"])
    run(func, source, out, table, 3)
    expected = np.zeros((4, 12), np.float32)
    for i in range(4):
        expected[i, :4] = source[12 * i + 3 : 12 * i + 7]
        expected[i, 4:8] = source[12 * i : 12 * i + 12 : 3]
        expected[i, 8:12] = source[table[4 * i : 4 * i + 4]][::-1]
        expected[i, 1:5] = expected[i, :4].copy()
    np.testing.assert_array_equal(out.reshape(4, 12), expected)


def test_vectors_of_conditions(run, kernel) -> None:
    def body(buffers, _, indices):
        a, b = (buffer.vload([T.Ramp(indices[0] * 4, 1, 4)]) for buffer in buffers[:2])
        both = tirx.And(a < b, tirx.Not(b < T.Broadcast(T.float16(0.5), 4)))
        either = tirx.Or(a < b, tirx.EQ(a, b))
        B.buffer_store(buffers[2], tirx.Select(both, a, b), [T.Ramp(indices[0] * 4, 1, 4)])
        B.buffer_store(buffers[3], either, [T.Ramp(indices[0] * 4, 1, 4)])
        B.buffer_store(
            buffers[4],
            tirx.Select(either, T.Broadcast(T.int8(1), 4), T.Broadcast(T.int8(-1), 4)),
            [T.Ramp(indices[0] * 4, 1, 4)],
        )

    a, b = (np.round(RNG.random(32), 1).astype(np.float16) for _ in range(2))
    outputs = [np.zeros(32, np.float16), np.zeros(32, bool), np.zeros(32, np.int8)]
    shapes = [((32,), str(array.dtype)) for array in (a, b, *outputs)]
    run(kernel("masks", shapes, body, sizes=[("threadIdx.x", 8)]), a, b, *outputs)
    np.testing.assert_array_equal(outputs[0], np.where((a < b) & ~(b < 0.5), a, b))
    np.testing.assert_array_equal(outputs[1], a <= b)
    np.testing.assert_array_equal(outputs[2], np.where(a <= b, 1, -1))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_sums_through_shared_memory(run, kernel, compiled, width: int, dtype: str) -> None:
    """A tree over 64 threads, each of which holds `width` lanes."""
    vector = dtype if width == 1 else f"{dtype}x{width}"

    def at(i: Any) -> list[Any]:
        return [i] if width == 1 else [T.Ramp(i * width, 1, width)]

    def body(buffers, _, indices):
        source, out = buffers
        block, thread = indices
        partial = B.alloc_buffer((64 * width,), dtype, scope="shared")
        B.buffer_store(partial, source.vload(at(block * 64 + thread)), at(thread))
        for half in (32, 16, 8, 4, 2, 1):
            B.evaluate(T.tvm_storage_sync("shared"))
            with B.If(thread < half), B.Then():
                total = partial.vload(at(thread)) + partial.vload(at(thread + half))
                assert str(total.ty.dtype) == vector
                B.buffer_store(partial, total, at(thread))
        B.evaluate(T.tvm_storage_sync("shared"))
        with B.If(thread == 0), B.Then():
            B.buffer_store(out, partial.vload(at(0)), at(block))

    shapes = [((3 * 64 * width,), dtype), ((3 * width,), dtype)]
    func = kernel("sums", shapes, body, sizes=[("blockIdx.x", 3), ("threadIdx.x", 64)])
    module = compiled(func)
    is_vector = any(f"shared {v}vec4" in source_of(module) for v in ("", "f16", "i"))
    assert is_vector == (width == 4)
    given = RNG.integers(0, 10, 192 * width).astype(dtype)
    out = np.zeros(3 * width, dtype)
    run(module["sums"], given, out)
    np.testing.assert_array_equal(out.reshape(3, width), given.reshape(3, 64, width).sum(1))


def test_arrays_that_are_seen_in_vectors_and_alone(run, kernel) -> None:
    def body(buffers, _, indices):
        row = B.alloc_buffer((8,), "float32", scope="local")
        B.buffer_store(row, buffers[0].vload([T.Ramp(indices[0] * 8, 1, 8)]), [T.Ramp(0, 1, 8)])
        B.buffer_store(row, row[3] + row[5], [4])
        B.buffer_store(buffers[1], row.vload([T.Ramp(0, 1, 8)]), [T.Ramp(indices[0] * 8, 1, 8)])

    given, out = RNG.random(32).astype(np.float32), np.zeros(32, np.float32)
    run(kernel("mixed", [((32,), "float32")] * 2, body, sizes=[("threadIdx.x", 4)]), given, out)
    expected = given.reshape(4, 8).copy()
    expected[:, 4] = expected[:, 3] + expected[:, 5]
    np.testing.assert_array_equal(out.reshape(4, 8), expected)


def test_arrays_of_one_name_are_declared_each_by_its_own_use(run, kernel, compiled) -> None:
    def body(buffers, _, indices):
        arrays = [B.alloc_buffer((8,), "float32", scope="local") for _ in range(4)]
        whole = [T.Ramp(0, 1, 8)]
        B.buffer_store(arrays[0], buffers[0].vload([T.Ramp(indices[0] * 8, 1, 8)]), whole)
        for i in range(8):
            B.buffer_store(arrays[1], T.Cast("float32", indices[0] + i), [i])
        B.buffer_store(arrays[2], arrays[0].vload(whole) + arrays[0].vload(whole), whole)
        for i in range(8):
            B.buffer_store(arrays[3], arrays[1][7 - i], [i])
        total = arrays[2].vload(whole) + arrays[3].vload(whole)
        B.buffer_store(buffers[1], total, [T.Ramp(indices[0] * 8, 1, 8)])

    given, out = RNG.random(32).astype(np.float32), np.zeros(32, np.float32)
    func = kernel("four", [((32,), "float32")] * 2, body, sizes=[("threadIdx.x", 4)])
    module = compiled(func)
    assert "  vec4 v_" in source_of(module)
    run(module["four"], given, out)
    added = np.arange(4)[:, None] + np.arange(8)[::-1]
    np.testing.assert_allclose(out.reshape(4, 8), 2 * given.reshape(4, 8) + added, rtol=1e-6)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_subgroups_exchange_values(run, kernel, width: int) -> None:
    """As CUDA's shuffles do within groups of `width` lanes."""
    calls = [T.tvm_warp_shuffle, T.tvm_warp_shuffle_up, T.tvm_warp_shuffle_down]

    def body(buffers, _, indices):
        i = indices[0]
        mask = T.tvm_warp_activemask()
        for n, call in enumerate(calls):
            B.buffer_store(buffers[1], call(mask, buffers[0][i], 1, width, 8), [n * 32 + i])

    given, out = RNG.random(32).astype(np.float32), np.zeros(96, np.float32)
    func = kernel(
        "shuffles", [((32,), "float32"), ((96,), "float32")], body, sizes=[("threadIdx.x", 32)]
    )
    run(func, given, out)
    groups = given.reshape(-1, width)
    first = np.repeat(groups[:, 1:2], width, 1)
    up = np.concatenate([groups[:, :1], groups[:, :-1]], 1)
    down = np.concatenate([groups[:, 1:], groups[:, -1:]], 1)
    np.testing.assert_array_equal(out, np.concatenate([x.ravel() for x in (first, up, down)]))


def test_groups_larger_than_a_subgroup_are_refused(run, kernel) -> None:
    ask = tvm.get_global_func("device_api.vulkan.get_target_property")
    largest = int(ask(tvm.device("vulkan", 0), "max_subgroup_size"))
    width = max(2 * largest, 64)

    def body(buffers, _, indices):
        value = T.tvm_warp_shuffle(T.tvm_warp_activemask(), buffers[0][indices[0]], 0, width, width)
        B.buffer_store(buffers[0], value, [indices[0]])

    func = kernel("wide", [((width,), "float32")], body, sizes=[("threadIdx.x", width)])
    text = f"exchanges values among {width} threads, but a subgroup of the Vulkan device .* has"
    with pytest.raises(RuntimeError, match=text):
        run(func, np.zeros(width, np.float32))


def test_subgroup_functions_by_name(run, kernel) -> None:
    def body(buffers, _, indices):
        i = indices[0]
        for n, name in enumerate(("subgroupAdd", "subgroupMax", "subgroupBroadcastFirst")):
            value = T.call_pure_extern("float32", name, buffers[0][i])
            B.buffer_store(buffers[1], value, [n * 8 + i])

    given, out = RNG.random(8).astype(np.float32), np.zeros(24, np.float32)
    func = kernel(
        "names", [((8,), "float32"), ((24,), "float32")], body, sizes=[("threadIdx.x", 8)]
    )
    run(func, given, out)
    expected = np.repeat([given.sum(), given.max(), given[0]], 8)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_all_dimensions_of_a_launch(run, kernel) -> None:
    sizes = [("blockIdx.x", 2), ("blockIdx.y", 3), ("blockIdx.z", 4),
             ("threadIdx.x", 5), ("threadIdx.y", 2), ("threadIdx.z", 3)]  # fmt: skip

    def body(buffers, _, indices):
        place: Any = T.int32(0)
        for (_, extent), index in zip(sizes, indices, strict=True):
            place = place * extent + index
        B.buffer_store(buffers[0], place, [place])

    out = np.zeros(720, np.int32)
    run(kernel("grid", [((720,), "int32")], body, sizes=sizes), out)
    assert out.tolist() == [*range(720)]


@pytest.mark.parametrize("count", [3, 40])
def test_scalars_of_every_type(run, kernel, count: int) -> None:
    """Few fit into push constants, many into a uniform buffer."""
    kinds = ("int64", "float32", "int32", "float64", "bool", "uint8", "float16")
    scalars = [kinds[i % len(kinds)] for i in range(count)]
    given = [
        bool(i % 3) if dtype == "bool" else i + 0.5 if "float" in dtype else i
        for i, dtype in enumerate(scalars)
    ]

    def body(buffers, numbers, _):
        for i, number in enumerate(numbers):
            B.buffer_store(buffers[0], T.Cast("float32", number), [i])

    out = np.zeros(count, np.float32)
    run(kernel("scalars", [((count,), "float32")], body, scalars=scalars), out, *given)
    np.testing.assert_array_equal(out, np.array(given, np.float32))


def test_sizes_of_64_bits(run, kernel, compiled) -> None:
    """Indices are computed in 32 bits, values of int64 in 64."""

    def body(buffers, scalars, indices):
        source, out = buffers
        n, i = scalars[0], T.Cast("int64", indices[0] * 16 + indices[1])
        with B.If(i < n), B.Then():
            row = B.Bind(tirx.truncdiv(i, T.int64(5)))
            column = B.Bind(tirx.truncmod(i, T.int64(5)))
            reversed_index = (n - 1) - (row * 5 + column)
            B.buffer_store(out, source[reversed_index] * source[i] + n * n * n, [i])
            with B.serial(n) as j, B.If(j == i), B.Then():
                B.buffer_store(out, out[i] + j, [i])

    size, n = 48, 40
    given = RNG.integers(-(2**31), 2**31, size)
    out = np.zeros(size, np.int64)
    func = kernel(
        "wide", [((size,), "int64")] * 2, body,
        sizes=[("blockIdx.x", 3), ("threadIdx.x", 16)], scalars=["int64"],
    )  # fmt: skip
    module = compiled(func)
    run(module["wide"], given, out, n)
    expected = np.zeros(size, np.int64)
    expected[:n] = given[:n][::-1] * given[:n] + n**3 + np.arange(n)
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match=r"'wide_kernel' is given the size 4294967296, which does"):
        run(module["wide"], given, out, 2**32)


def test_empty_tensors_and_empty_launches(run, kernel) -> None:
    def body(buffers, scalars, indices):
        with B.If(indices[0] < 0), B.Then():
            B.buffer_store(buffers[1], buffers[0][indices[0]], [indices[0]])
        B.buffer_store(buffers[1], T.float32(7), [indices[0]])

    func = kernel(
        "empty", [((0,), "float32"), ((4,), "float32")], body,
        sizes=[("blockIdx.x", lambda numbers: numbers[0]), ("threadIdx.x", 1)], scalars=["int32"],
    )  # fmt: skip
    out = np.zeros(4, np.float32)
    run(func, np.zeros(0, np.float32), out, 0)
    assert not out.any()
    run(func, np.zeros(0, np.float32), out, 3)
    assert out.tolist() == [7, 7, 7, 0]


def test_an_argument_seen_as_another_type(run, kernel) -> None:
    """A buffer of words, declared again as halves."""

    def body(buffers, _, indices):
        halves = B.decl_buffer((16,), "float16", data=buffers[0].data)
        i = indices[0]
        B.buffer_store(buffers[1], T.Cast("float32", halves[i * 2] + halves[i * 2 + 1]), [i])

    given = RNG.random(16).astype(np.float16)
    out = np.zeros(8, np.float32)
    shapes = [((8,), "uint32"), ((8,), "float32")]
    run(kernel("halves", shapes, body, sizes=[("threadIdx.x", 8)]), given.view(np.uint32), out)
    expected = (given[::2] + given[1::2]).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=1e-3)


def test_atomic_additions(run, kernel) -> None:
    def body(buffers, _, indices):
        i = indices[0] * 32 + indices[1]
        place = T.address_of(buffers[1][buffers[0][i]])
        B.evaluate(tirx.call_intrin("int32", "tirx.atomic_add", place, T.int32(2)))

    given = RNG.integers(0, 5, 128).astype(np.int32)
    out = np.zeros(5, np.int32)
    func = kernel(
        "count", [((128,), "int32"), ((5,), "int32")], body,
        sizes=[("blockIdx.x", 4), ("threadIdx.x", 32)],
    )  # fmt: skip
    run(func, given, out)
    np.testing.assert_array_equal(out, 2 * np.bincount(given, minlength=5))


@pytest.mark.parametrize("name", ["<lambda>", "float", "main", "größe", "a.b-c", "__x__"])
def test_any_name_will_do(run, kernel, compiled, name: str) -> None:
    def body(buffers, _, indices):
        local = B.alloc_buffer((1,), "float32", scope="local")
        B.buffer_store(local, T.float32(3), [0])
        value = B.Bind(local[0] + 1)
        B.buffer_store(buffers[0], value, [indices[0]])

    func = kernel("f", [((4,), "float32")], body, sizes=[("threadIdx.x", 4)])
    out = np.zeros(4, np.float32)
    run(compiled(func.with_attr("global_symbol", name))[name], out)
    assert out.tolist() == [4] * 4


def _refused(kernel, compiled, body: Any, **options: Any) -> str:
    func = kernel("refused", [((8,), "float32")], body, **options)
    with pytest.raises(CompileError) as caught:
        compiled(func)
    text = str(caught.value)
    assert "kernel 'refused_kernel' cannot be compiled for Vulkan" in text and "\n" not in text
    return text


def test_what_cannot_be_compiled_is_named(kernel, compiled) -> None:
    def unknown_call(buffers, _, indices):
        value = T.call_pure_extern("float32", "my_function", buffers[0][0])
        B.buffer_store(buffers[0], value, [indices[0]])

    assert "it calls my_function" in _refused(kernel, compiled, unknown_call)

    def doubles(buffers, _, indices):
        value = tirx.exp(T.Cast("float64", buffers[0][0]))
        B.buffer_store(buffers[0], T.Cast("float32", value), [indices[0]])

    assert "it calls exp of float64" in _refused(kernel, compiled, doubles)

    def other_memory(buffers, _, indices):
        strange = B.alloc_buffer((8,), "float32", scope="texture")
        B.buffer_store(strange, buffers[0][0], [indices[0]])
        B.buffer_store(buffers[0], strange[0], [indices[0]])

    assert "is in texture memory" in _refused(kernel, compiled, other_memory)

    def any_threads(buffers, _, indices):
        B.buffer_store(buffers[0], T.float32(1), [indices[0]])

    sizes = [("threadIdx.x", lambda numbers: numbers[0])]
    text = _refused(kernel, compiled, any_threads, sizes=sizes, scalars=["int32"])
    assert "threadIdx.x has no constant extent" in text


@pytest.mark.parametrize(
    ("rows", "shared", "message"),
    [
        (16, 1, r"wants 16384 threads in a work group, but the Vulkan device .* has \d+"),
        (1, 1 << 22, r"wants \d+ bytes of shared memory, but the Vulkan device .* has \d+"),
    ],
)
def test_what_the_device_lacks_is_said(
    run, kernel, compiled, rows: int, shared: int, message: str
) -> None:
    def body(buffers, _, indices):
        stride = max(shared // 1024, 1)
        array = B.alloc_buffer((1024 * stride,), "float32", scope="shared")
        B.buffer_store(array, T.float32(1), [indices[0] * stride])
        B.evaluate(T.tvm_storage_sync("shared"))
        B.buffer_store(buffers[0], array[(1023 - indices[0]) * stride], [0])

    sizes = [("threadIdx.x", 1024), ("threadIdx.y", rows)]
    func = kernel("greedy", [((1,), "float32")], body, sizes=sizes)
    with pytest.raises(RuntimeError, match="kernel 'greedy_kernel' " + message):
        run(compiled(func)["greedy"], np.zeros(1, np.float32))


def test_every_construct_unknown_to_glsl_is_an_error_not_a_crash() -> None:
    """A statement of another machine."""
    body = tirx.Evaluate(tirx.call_intrin("handle", "tirx.prefetch", tirx.const(0, "int32")))
    func = tirx.PrimFunc([], body).with_attr("tirx.kernel_launch_params", [])
    with pytest.raises(CompileError, match="it calls prefetch"):
        write_kernel("k", func)
    assert tvm.get_global_func("target.build.vulkan", allow_missing=True) is not None
