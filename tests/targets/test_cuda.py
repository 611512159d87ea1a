import pytest
from everycast.targets.cuda import with_register_bounds


@pytest.mark.parametrize(("threads", "blocks"), [(64, 6), (128, 3), (256, 2), (384, 1), (1024, 1)])
def test_kernels_say_how_many_blocks_are_enough(threads, blocks):
    source = 'extern "C" __global__ void __launch_bounds__({}) f(int n);'
    assert with_register_bounds(source.format(threads)) == source.format(f"{threads}, {blocks}")
