import pytest
from everycast.schedules.cpu.isa import CpuIsa, isa_of
from tvm.target import Target


@pytest.mark.parametrize(
    ("target", "name", "has_vnni512"),
    [
        ({"mcpu": "znver4"}, "avx512", True),
        ({"mcpu": "icelake-server"}, "avx512", True),
        ({"mcpu": "x86-64-v4"}, "avx512", False),
        ({"mcpu": "skylake-avx512"}, "avx512", False),
        ({"mcpu": "x86-64-v3"}, "avx2", False),
        ({"mcpu": "x86-64"}, "generic", False),
        ({"mcpu": "cortex-a76", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}, "neon", False),
        ({"mcpu": "apple-m1", "mtriple": "arm64-apple-macos"}, "neon", False),
    ],
)
def test_instruction_sets(target, name, has_vnni512):
    isa = isa_of(Target({"kind": "llvm", **target}))
    assert (isa.name, isa.has_vnni512) == (name, has_vnni512)


@pytest.mark.parametrize("isa", [CpuIsa("a", 16, 32), CpuIsa("b", 8, 16), CpuIsa("c", 4, 16)])
def test_tiles_fit_in_the_registers_and_reach_every_count(isa):
    tiles = isa.token_tiles
    assert (tiles[0] + 2) * (16 // isa.lanes) <= isa.num_registers
    reachable = {0}
    for tile in tiles[1:]:
        reachable |= {count + tile for count in reachable}
    assert reachable >= set(range(tiles[0]))


@pytest.mark.parametrize(
    ("lanes", "num_registers", "chains"), [(16, 32, 2), (8, 16, 1), (4, 32, 1)]
)
def test_two_sums_a_token_only_where_a_full_tile_fits_twice(lanes, num_registers, chains):
    assert CpuIsa("x", lanes, num_registers).chains == chains
