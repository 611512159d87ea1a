"""Any parameters give the same kernel up to speed: the same bits."""

from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.isa import CpuIsa
from everycast.schedules.cpu.linear_operator import LinearOperator
from everycast.schedules.cpu.linear_schedule import LinearSchedule, default_schedule
from everycast.schedules.cpu.packing import PackedWeight
from hypothesis import given
from hypothesis import strategies as st

Q4 = TensorFormat("float16", 4, 32, None)
SCHEDULES = [
    {"tile_tokens": 3, "pair_tokens": 5, "prefetch_one": 1024, "prefetch_few": 0},
    {"tile_tokens": 6, "pair_tokens": 0, "unpack_tokens": 0, "chunk_bytes": 1},
    {"tile_tokens": 4, "pair_tokens": 0, "unpack_tokens": 5, "prefetch_many": 1 << 20},
    {"tile_tokens": 2, "pair_tokens": 0, "prefetch_tile": 0, "prefetch_many": 64},
    {"tile_tokens": 4, "many_tokens": 0},
    {"many_tokens": 2, "prefetch_many": 0},
]


def operator(terms: int, **options) -> LinearOperator:
    weight = PackedWeight(Q4, 40, 136)
    count = 2 if "activation" in options else 1
    return LinearOperator(weights=(weight,) * count, biases=(True,) * count, terms=terms, **options)


def run(lab, op, kernel, m):
    """The operator's output for m random tokens, always the same ones, as bits."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, 136), dtype=np.float32)
    arguments = lab.quantized(x, op.terms, 0.0, op.weights)[0] if op.terms else [lab.tensor(x)]
    for _ in op.weights:
        arguments = [
            *arguments,
            lab.random_weight(op.weights[0], np.random.default_rng(1))[0],
            lab.tensor(rng.standard_normal(40, dtype=np.float32)),
        ]
    if op.residual:
        arguments.append(lab.tensor(rng.standard_normal((m, 40), dtype=np.float32)))
    y = lab.tensor(np.full((m, 40), np.nan, np.float32))
    kernel(*arguments, y)
    return y.numpy().view(np.int32)


@pytest.mark.parametrize("lab", ["avx2", "avx512"], indirect=True)
@pytest.mark.parametrize(
    "op", [operator(0), operator(2, residual=True), operator(1, activation="silu")], ids=str
)
def test_no_parameter_changes_a_bit(lab, op):
    batches = (1, 2, 5, 37)
    # Small default tiles: less code to compile.
    isa = replace(lab.isa, num_registers=4 * 16 // lab.isa.lanes)
    default = lab.build(op.kernel(isa))
    expected = [run(lab, op, default, m) for m in batches]
    for parameters in SCHEDULES:
        schedule = op.default_schedule(isa).with_parameters(parameters)
        kernel = lab.build(op.kernel(isa, schedule))
        for m, bits in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(run(lab, op, kernel, m), bits)


def test_schedules_have_functions_of_their_own(lab):
    op = operator(1)
    default = op.default_schedule(lab.isa)
    assert op.kernel(lab.isa) is op.kernel(lab.isa, default)
    other = op.kernel(lab.isa, default.with_parameters({"prefetch_one": 64}))
    assert other.attrs["global_symbol"] != op.kernel(lab.isa).attrs["global_symbol"]


@given(st.integers(1, 64), st.integers(0, 200))
def test_tiles_reach_every_count(tile_tokens, count):
    tiles = LinearSchedule(tile_tokens=tile_tokens).tiles
    assert tiles[0] == tile_tokens and tiles[-1] == 1
    rest = count % tiles[0]
    assert sum(size for size in tiles[1:] if rest & size) == rest


def test_a_tile_takes_the_parameters_of_its_bucket():
    schedule = LinearSchedule(tile_tokens=8, prefetch_one=1, prefetch_few=2, prefetch_many=3)
    assert [schedule.prefetch_bytes(tokens) for tokens in schedule.tiles] == [3, 2, 2, 1]
    assert LinearSchedule(tile_tokens=1, prefetch_one=5).prefetch_bytes(1) == 5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tile_tokens": 0}, "tile_tokens"),
        ({"pair_tokens": -1}, "pair_tokens"),
        ({"unpack_tokens": -1}, "unpack_tokens"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"prefetch_one": -1}, "prefetch_one"),
        ({"prefetch_few": 2.0}, "prefetch_few"),
        ({"prefetch_tile": -1}, "prefetch_tile"),
        ({"prefetch_many": True}, "prefetch_many"),
        ({"unroll": 4}, "has no unroll"),
    ],
)
def test_impossible_parameters(parameters, message):
    with pytest.raises(ValueError, match=message):
        LinearSchedule(tile_tokens=8).with_parameters(parameters)


def test_defaults():
    isa = CpuIsa("avx512", 16, 32, "avx512vnni")
    assert default_schedule(isa, 1, is_quantized=True).prefetch_many > 0
    assert default_schedule(isa, 0, is_quantized=False).prefetch_many == 0
    assert default_schedule(isa, 1, is_quantized=False).prefetch_many > 0
    assert default_schedule(isa, 0, is_quantized=False).prefetch_one == 0
    assert default_schedule(isa, 1, is_quantized=True).pair_tokens == 0


def test_many_tokens_prefetch_the_next_blocks():
    isa = CpuIsa("avx512", 16, 32, "avx512vnni")
    one = default_schedule(isa, 1, is_quantized=True, block_bytes=20000)
    two = default_schedule(isa, 1, is_quantized=True, has_many=True, block_bytes=20000)
    assert one.prefetch_many == two.prefetch_many == 20000
    long, pair = (
        default_schedule(isa, 1, is_quantized=True, has_many=has_many, block_bytes=1 << 20)
        for has_many in (False, True)
    )
    assert (long.prefetch_many, pair.prefetch_many) == (256 * 1024, 128 * 1024)


@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize(("lanes", "num_registers"), [(16, 32), (8, 16), (4, 32)])
def test_pairs_are_for_integers_in_whole_registers(lanes, num_registers, terms):
    isa = CpuIsa("some", lanes, num_registers, "avx512bw")
    schedule = default_schedule(isa, terms, is_quantized=True, has_pairs=True)
    assert (schedule.pair_tokens > 0) == (lanes == 16 and terms > 0)
    # Their sums of integers alone fit in the registers.
    assert 2 * schedule.pair_tokens < num_registers // 2


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_many_tokens_are_for_integers_and_vnni(terms):
    vnni, bw = (CpuIsa("avx512", 16, 32, byte_dot) for byte_dot in ("avx512vnni", "avx512bw"))
    many = default_schedule(vnni, terms, is_quantized=True, has_pairs=True, has_many=True)
    assert (many.many_tokens > many.tile_tokens) == (terms > 0)
    assert many.pair_tokens == 0
    assert default_schedule(vnni, terms, is_quantized=True).many_tokens == 0
    assert default_schedule(bw, terms, is_quantized=True, has_many=True).many_tokens == 0


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_blocks_are_unpacked_for_several_small_tiles(terms):
    avx2, vnni = (CpuIsa("avx2", 8, 16, byte_dot) for byte_dot in ("avx2", "avxvnni"))
    schedule = default_schedule(avx2, terms, is_quantized=True, has_pairs=True)
    assert (schedule.unpack_tokens > schedule.tile_tokens) == (terms > 0)
    assert default_schedule(avx2, terms, is_quantized=True).unpack_tokens == 0
    assert default_schedule(vnni, terms, is_quantized=True, has_pairs=True).unpack_tokens == 0


def test_names_tell_operators_apart():
    weight, other = PackedWeight(Q4, 40, 136), PackedWeight(Q4, 40, 128)
    affine = PackedWeight(TensorFormat("float16", 4, 32, 8), 40, 136)
    operators = [
        LinearOperator(weights=weights, biases=biases, terms=terms, **options)
        for weights in ((weight,), (other,), (affine,), (weight, weight))
        for biases in ((False,) * len(weights), (True,) * len(weights))
        for terms in (0, 1, 2)
        for options in (
            [{}, {"residual": True}]
            if len(weights) == 1
            else [{}, {"activation": "silu"}, {"activation": "gelu_tanh"}]
        )
    ]
    assert len({op.name for op in operators}) == len(set(operators)) == len(operators)
