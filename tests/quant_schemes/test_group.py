import ml_dtypes
import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes import SCHEMES, cast_float, dequantize, quantize
from everycast.quant_schemes import group as group_module
from everycast.quant_schemes.bits import unpack_values
from everycast.quant_schemes.rounding import Rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

Q3 = TensorFormat("float16", 3, 40, zero_point=3)
Q4 = TensorFormat("float16", 4, 32, zero_point=7)
Q4_F32 = TensorFormat("float32", 4, 32, zero_point=7)
Q4_KN = TensorFormat("float16", 4, 32, zero_point=7, layout="KN")
Q8 = TensorFormat("float16", 8, 32, zero_point=127)
A4 = TensorFormat("float16", 4, 32)
A4_KN = TensorFormat("float16", 4, 32, layout="KN")
A5 = TensorFormat("float16", 5, 32)
A6_F32 = TensorFormat("float32", 6, 16)
RULES: list[tuple[TensorFormat, Rounding]] = [
    *((fmt, "mlc") for fmt in (Q3, Q4, Q4_F32, Q4_KN, Q8)),
    *((fmt, "searched") for fmt in (Q3, Q4, Q4_F32, Q4_KN, Q8)),
    *((fmt, "minmax") for fmt in (A4, A4_KN, A5, A6_F32)),
    *((fmt, "searched") for fmt in (A4, A4_KN, A5, A6_F32)),
]


def normal(n: int, k: int, scale: float = 0.02, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, k)) * scale).astype(np.float32)


def relative_error(weight: np.ndarray, fmt: TensorFormat, rounding: Rounding) -> float:
    """Root mean square error over root mean square weight."""
    parts = quantize(weight, fmt, rounding, name="w")
    weight = weight.astype(np.float64)
    error = dequantize(parts, fmt, *weight.shape) - weight
    return float(np.sqrt(np.mean(error**2) / np.mean(weight**2)))


@pytest.mark.parametrize(("fmt", "rounding"), RULES)
@pytest.mark.parametrize("k", [1, 32, 90])
def test_parts_are_those_of_the_format(fmt: TensorFormat, rounding: Rounding, k: int) -> None:
    parts = quantize(normal(5, k), fmt, rounding, name="w")
    assert {p: (a.shape, a.dtype.name) for p, a in parts.items()} == fmt.parts(5, k)


@pytest.mark.parametrize(("fmt", "rounding"), RULES)
def test_dequantize_follows_the_formula(fmt: TensorFormat, rounding: Rounding) -> None:
    n, k = 3, 90
    parts = quantize(normal(n, k), fmt, rounding, name="w")
    q = unpack_values(parts, fmt, n, k)
    scale, minimum = (
        parts[p].T if p in parts and fmt.layout == "KN" else parts.get(p)
        for p in ("q_scale", "q_min")
    )
    assert scale is not None
    weight = dequantize(parts, fmt, n, k)
    assert weight.dtype == np.float32
    for row in range(n):
        for column in range(k):
            s = np.float32(scale[row, column // fmt.group_size])
            if fmt.zero_point is not None:
                expected = np.float32(int(q[row, column]) - fmt.zero_point) * s
            else:
                assert minimum is not None
                expected = np.float32(q[row, column]) * s + np.float32(
                    minimum[row, column // fmt.group_size]
                )
            assert weight[row, column] == expected


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 3), ("float16", 4), ("float16", 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6, 1000.0])
def test_mlc_rounding_is_float16_arithmetic(dtype: str, bits: int, scale: float) -> None:
    """Each step in NumPy's own float16, including scales below the normal numbers."""
    fmt = {3: Q3, 4: Q4, 8: Q8}[bits]
    max_int = np.float16(2 ** (bits - 1) - 1)
    w = normal(64, fmt.group_size, scale).astype(np.float16)
    expected_scale = np.abs(w).max(axis=1, keepdims=True) / max_int
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.rint(w / expected_scale + max_int).clip(0, 2 * max_int)
    parts = quantize(w, fmt, "mlc", name="w")
    np.testing.assert_array_equal(parts["q_scale"], expected_scale)
    rows = expected_scale[:, 0] > 0
    q = unpack_values(parts, fmt, *w.shape)
    np.testing.assert_array_equal(q[rows], x[rows])


@pytest.mark.parametrize(("fmt", "rounding"), RULES)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5, 3e-7])
def test_constant_groups_stay_as_they_are(
    fmt: TensorFormat, rounding: Rounding, value: float
) -> None:
    weight = np.full((2, 40), value, np.float32)
    result = dequantize(quantize(weight, fmt, rounding, name="w"), fmt, 2, 40)
    # One float16 step of the scale times the largest level, and float16's smallest number.
    np.testing.assert_allclose(result, weight, rtol=2**-10, atol=130 * 2**-25)


@pytest.mark.parametrize(("fmt", "rounding"), RULES)
def test_error_is_at_most_half_a_step(fmt: TensorFormat, rounding: Rounding) -> None:
    """Searched ranges may clip, so only the rules that cover the range promise this."""
    if rounding == "searched":
        return
    weight = normal(16, 120)
    error = np.abs(dequantize(quantize(weight, fmt, rounding, name="w"), fmt, 16, 120) - weight)
    levels = 2 ** (fmt.bits or 0) - (1 if fmt.is_affine else 2)
    padded = np.pad(weight, ((0, 0), (0, fmt.padded_k(120) - 120)), mode="edge")
    groups = padded.reshape(16, -1, fmt.group_size)
    span = np.ptp(groups, -1) if fmt.is_affine else 2 * np.abs(groups).max(-1)
    bound = np.repeat(span / levels, fmt.group_size, axis=1)[:, :120] / 2
    # float16 rounds weight and scale, and for 8 bits the quotient too (step 1/8 near 254).
    assert (error <= bound * (1.3 if fmt.dtype == "float16" else 1.001)).all()


# Root mean square error relative to the weights', on normal weights: what each format costs.
ERROR_TABLE: list[tuple[TensorFormat, Rounding, float]] = [
    (Q3, "mlc", 0.234),
    (Q3, "searched", 0.170),
    (Q4, "mlc", 0.0970),
    (Q4, "searched", 0.0815),
    (A4, "minmax", 0.0782),
    (A4, "searched", 0.0728),
    (TensorFormat("float16", 4, 64), "searched", 0.0845),
    (A5, "minmax", 0.0378),
    (A5, "searched", 0.0350),
    (Q8, "mlc", 0.00547),
    (Q8, "searched", 0.00490),
]


@pytest.mark.parametrize(("fmt", "rounding", "expected"), ERROR_TABLE)
def test_error_table(fmt: TensorFormat, rounding: Rounding, expected: float) -> None:
    weight = normal(256, 1280)
    assert relative_error(weight, fmt, rounding) == pytest.approx(expected, rel=0.02)


def test_searched_works_at_any_size_of_weights() -> None:
    weight = normal(64, 320, 1.0)
    for scale in (1e-20, 1e20):
        for fmt in (Q4_F32, A6_F32):
            assert relative_error(weight * np.float32(scale), fmt, "searched") == pytest.approx(
                relative_error(weight, fmt, "searched"), rel=1e-3
            )


def test_searched_handles_an_offset_group() -> None:
    """Spread small against the mean: what least squares cancels in if done carelessly."""
    weight = normal(64, 64, 1e-3) + np.float32(1)
    fmt = TensorFormat("float32", 4, 32)
    spread = relative_error(weight, fmt, "searched") / 1e-3
    assert spread < 0.08


@pytest.mark.parametrize("rounding", ["mlc", "searched"])
def test_layouts_hold_the_same_words(rounding: Rounding) -> None:
    weight = normal(40, 100)
    nk, kn = (quantize(weight, fmt, rounding, name="w") for fmt in (Q4, Q4_KN))
    for part in nk:
        np.testing.assert_array_equal(nk[part], kn[part].T)
    np.testing.assert_array_equal(dequantize(nk, Q4, 40, 100), dequantize(kn, Q4_KN, 40, 100))


@pytest.mark.parametrize("fmt", [Q4_KN, A4])
def test_blocks_of_rows_do_not_show(fmt: TensorFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(23, 70)
    whole = quantize(weight, fmt, "searched", name="w")
    monkeypatch.setattr(group_module, "_BLOCK_WEIGHTS", 300)
    pieces = quantize(weight, fmt, "searched", name="w")
    for part in whole:
        np.testing.assert_array_equal(whole[part], pieces[part])


def test_the_last_group_ignores_its_padding() -> None:
    """33 columns: the second group holds one weight, which must come out almost as it is."""
    weight = np.full((1, 33), 0.25, np.float32)
    weight[0, -1] = 7.0
    for rounding in ("minmax", "searched"):
        parts = quantize(weight, A4, rounding, name="w")  # type: ignore[arg-type]
        assert dequantize(parts, A4, 1, 33)[0, -1] == 7.0


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 70)),
        elements=st.floats(-60000, 60000, width=32),
    ),
    st.sampled_from(RULES),
)
def test_any_weights_give_finite_results(
    weight: np.ndarray, rule: tuple[TensorFormat, Rounding]
) -> None:
    fmt, rounding = rule
    result = dequantize(quantize(weight, fmt, rounding, name="w"), fmt, *weight.shape)
    assert np.isfinite(result).all()
    # Never worse than one step of the widest range plus float16's smallest numbers.
    levels = 2 ** (fmt.bits or 0) - 2
    worst = 2 * float(np.abs(weight).max()) / levels * 1.2 + levels * 2**-24
    assert np.abs(result - weight).max() <= worst


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", [Q4, A4, TensorFormat("float16"), TensorFormat("float32")])
def test_nan_and_infinity_name_the_tensor(bad: float, fmt: TensorFormat) -> None:
    weight = normal(4, 64)
    weight[2, 33] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.weight holds NaN or infinity"):
        quantize(weight, fmt, "searched", name="layers.3.weight")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fmt", [Q4, Q8, A4, TensorFormat("float16")])
def test_too_large_for_float16_names_the_tensor(fmt: TensorFormat, dtype: type) -> None:
    """Case 35: flagged, not turned into infinity."""
    weight = normal(4, 64).astype(dtype)
    weight[1, 1] = -70000
    with pytest.raises(CheckpointError, match=r"tensor w holds -7\d+, but float16 .* 65504"):
        quantize(weight, fmt, "searched" if fmt.bits else "mlc", name="w")
    float32 = quantize(weight, TensorFormat("float32"), "mlc", name="w")["weight"]
    assert float32[1, 1] == np.float32(weight[1, 1])


def test_norm_weights_of_any_shape_are_checked() -> None:
    assert cast_float(np.ones(3, np.float32), "float16", name="norm").dtype == np.float16
    assert cast_float(np.zeros(0, np.float32), "float16", name="norm").shape == (0,)
    with pytest.raises(CheckpointError, match="tensor norm holds 100000"):
        cast_float(np.array([1.0, 1e5], np.float32), "float16", name="norm")
    with pytest.raises(CheckpointError, match="tensor norm holds NaN"):
        cast_float(np.array([1.0, np.nan], ml_dtypes.bfloat16), "bfloat16", name="norm")


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_takes_a_bfloat16_source(name: str) -> None:
    """Case 35: the error of each scheme is bounded."""
    scheme = SCHEMES[name]
    weight = normal(64, 200).astype(ml_dtypes.bfloat16)
    exact = weight.astype(np.float32)
    for fmt in (scheme.linear, scheme.embedding, scheme.head):
        parts = quantize(weight, fmt, scheme.rounding, name="w")
        error = dequantize(parts, fmt, 64, 200) - exact
        limit = {3: 0.25, 4: 0.1, 5: 0.04, 8: 0.006, None: 1e-4}[fmt.bits]
        assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < limit


@pytest.mark.parametrize(("fmt", "rounding"), [(A4, "mlc"), (Q4, "minmax")])
def test_rounding_that_cannot_make_the_format(fmt: TensorFormat, rounding: Rounding) -> None:
    with pytest.raises(ValueError, match=f"rounding '{rounding}' does not make"):
        quantize(normal(1, 32), fmt, rounding, name="w")


def test_mlc_rounding_needs_its_zero_point() -> None:
    with pytest.raises(ValueError, match="needs zero point 7, not 8"):
        quantize(normal(1, 32), TensorFormat("float16", 4, 32, 8), "mlc", name="w")


def test_a_missing_scale_is_refused() -> None:
    parts = quantize(normal(1, 32), Q4, "mlc", name="w")
    del parts["q_scale"]
    with pytest.raises(ValueError, match="part q_scale is missing"):
        dequantize(parts, Q4, 1, 32)
