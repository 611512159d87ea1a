import pytest
from everycast.schedules.cpu.byte_dots import BYTE_DOTS
from everycast.schedules.cpu.isa import CpuIsa, isa_of
from everycast.schedules.cpu.linear_schedule import default_schedule
from tvm.target import Target


@pytest.mark.parametrize(
    ("target", "name", "byte_dot"),
    [
        ({"mcpu": "znver4"}, "avx512", "avx512vnni"),
        ({"mcpu": "icelake-server"}, "avx512", "avx512vnni"),
        ({"mcpu": "x86-64-v4"}, "avx512", "avx512bw"),
        ({"mcpu": "skylake-avx512"}, "avx512", "avx512bw"),
        ({"mcpu": "knl"}, "avx2", "avx2"),
        ({"mcpu": "x86-64-v3"}, "avx2", "avx2"),
        ({"mcpu": "alderlake"}, "avx2", "avxvnni"),
        ({"mcpu": "sierraforest"}, "avx2", "avxvnni"),
        ({"mcpu": "x86-64"}, "generic", None),
        ({"mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"}, "neon", None),
        ({"mcpu": "cortex-a76", "mtriple": "aarch64-linux-gnu"}, "neon", "dotprod"),
        ({"mcpu": "neoverse-v1", "mtriple": "aarch64-linux-gnu"}, "neon", "i8mm"),
        ({"mcpu": "apple-m1", "mtriple": "arm64-apple-macos"}, "neon", "dotprod"),
    ],
)
def test_instruction_sets(target, name, byte_dot):
    isa = isa_of(Target({"kind": "llvm", **target}))
    assert (isa.name, isa.byte_dot) == (name, byte_dot)
    assert byte_dot is None or BYTE_DOTS[byte_dot].lanes == isa.lanes


@pytest.mark.parametrize(
    ("target", "has_bf16_dot"),
    [
        ({"mcpu": "cooperlake"}, True),
        ({"mcpu": "znver4"}, True),
        ({"mcpu": "icelake-server"}, False),
        ({"mcpu": "znver4", "mattr": ["-avx512bf16"]}, False),
        ({"mcpu": "neoverse-v1", "mtriple": "aarch64-linux-gnu"}, False),
    ],
)
def test_dot_products_of_bfloat16(target, has_bf16_dot):
    assert isa_of(Target({"kind": "llvm", **target})).has_bf16_dot == has_bf16_dot


@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize("isa", [CpuIsa("a", 16, 32), CpuIsa("b", 8, 16), CpuIsa("c", 4, 16)])
def test_tiles_fit_in_the_registers_and_reach_every_count(isa, terms):
    tiles = default_schedule(isa, terms, is_quantized=True).tiles
    sums = tiles[0] * max(1, terms) * (16 // isa.lanes)
    assert sums <= (isa.num_registers // 2 if terms else isa.num_registers - 2 * 16 // isa.lanes)
    reachable = {0}
    for tile in tiles[1:]:
        reachable |= {count + tile for count in reachable}
    assert reachable >= set(range(tiles[0]))


@pytest.mark.parametrize(
    ("lanes", "num_registers", "chains"), [(16, 32, 2), (8, 16, 1), (4, 32, 1)]
)
def test_two_sums_a_token_only_where_a_full_tile_fits_twice(lanes, num_registers, chains):
    assert CpuIsa("x", lanes, num_registers).chains == chains
