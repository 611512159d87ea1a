from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.targets import nvcc
from everycast.targets.cuda import chosen_architectures, with_register_bounds
from everycast.targets.nvcc import Nvcc


@pytest.mark.parametrize(("threads", "blocks"), [(64, 6), (128, 3), (256, 2), (384, 1), (1024, 1)])
def test_kernels_say_how_many_blocks_are_enough(threads, blocks):
    source = 'extern "C" __global__ void __launch_bounds__({}) f(int n);'
    assert with_register_bounds(source.format(threads)) == source.format(f"{threads}, {blocks}")


KNOWN = ("sm_75", "sm_80", "sm_90", "sm_120")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (["sm_90"], ("sm_90",)),
        (["sm_120", "sm_80"], ("sm_80", "sm_120")),
        (["sm_90", "sm_90"], ("sm_90",)),
    ],
)
def test_architectures_oldest_first(asked, chosen):
    assert chosen_architectures(asked, KNOWN) == chosen


@pytest.mark.parametrize(
    ("asked", "said"),
    [("sm_75", "too old an"), ("sm_91", "unknown"), ("", "unknown"), ("gfx942", "unknown")],
)
def test_architectures_that_cannot_be(asked, said):
    with pytest.raises(
        CompileError, match=f"^{said} architecture '{asked}' .* knows sm_80, sm_90, sm_120$"
    ):
        chosen_architectures(["sm_90", asked], KNOWN)


def test_the_error_and_not_a_warning_before_it_is_shown(tmp_path: Path):
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        "#!/bin/sh\n"
        'echo "k.cu(2): warning #1046-D: cannot be represented exactly" >&2\n'
        'echo "k.cu(9): error: no cp.async" >&2\n'
        "exit 2\n"
    )
    compiler.chmod(0o755)
    with pytest.raises(CompileError, match=r"^nvcc failed \(exit code 2\): k.cu\(9\): error"):
        Nvcc(str(compiler)).compile("", ("sm_80",))


@pytest.mark.parametrize(
    ("architectures", "wanted"),
    [
        (("sm_90",), ["arch=compute_90,code=[sm_90]", "arch=compute_90,code=compute_90"]),
        (
            ("sm_80", "sm_90", "sm_100", "sm_120"),
            [
                "arch=compute_80,code=[sm_80,sm_90]",
                "arch=compute_100,code=[sm_100,sm_120]",
                "arch=compute_120,code=compute_120",
            ],
        ),
    ],
)
def test_architectures_share_the_front_end(architectures, wanted):
    options = nvcc._code_options(architectures)
    assert options[1::2] == wanted and set(options[::2]) == {"-gencode"}
