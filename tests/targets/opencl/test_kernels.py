"""One kernel of each sort on PoCL, by the tests that all of them pass on Vulkan."""

import pytest

FORMATS = ("q4f16_1", "q4f32_1", "q3f16_1", "q0f16")


@pytest.mark.parametrize("name", FORMATS)
def test_linear(gpu, kernel_tests, name):
    tests = kernel_tests("test_linear")
    tests.test_linear_with_bias_and_residual(gpu, tests.FORMATS[name])


def test_gated(gpu, kernel_tests):
    tests = kernel_tests("test_linear")
    tests.test_gated(gpu, tests.FORMATS["q4f16_1"], tests.silu)


def test_embedding(gpu, kernel_tests):
    tests = kernel_tests("test_linear")
    tests.test_embedding(gpu, tests.FORMATS["q4f16_1"])


def test_norm_and_rows(gpu, kernel_tests):
    tests = kernel_tests("test_norm_and_rotary")
    tests.test_rms_norm(gpu, 576, True, subgroup=None)
    tests.test_take_rows(gpu)


def test_angles(gpu, kernel_tests):
    """Exact constants too: angles are wrong in the sixth digit without."""
    kernel_tests("test_norm_and_rotary").test_rotary_table_is_as_exact_as_float32_angles(
        gpu, 32, 1.0
    )


def test_attention(gpu, kernel_tests):
    tests = kernel_tests("test_attention")
    tests.test_append_and_attention(gpu, 9, 3, 64, 64, "float16", None)
    tests.test_long_contexts_are_split(gpu, None)
