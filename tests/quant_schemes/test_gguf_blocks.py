"""Against PyPI `gguf`, the reference: the same numbers, to the last bit."""

import gguf
import numpy as np
import pytest
from everycast.artifact.errors import CheckpointError
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes import dequantize, find_scheme, format_for, import_blocks
from everycast.quant_schemes import gguf_blocks as module
from everycast.quant_schemes.bits import unpack_values
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# Block size in values and bytes, and where the float16 numbers lie.
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def assert_equals_gguf(raw: np.ndarray, ggml_type: str) -> None:
    fmt, parts = import_blocks(raw, ggml_type, name="w")
    assert fmt == format_for(ggml_type)
    n, k = raw.shape[0], raw.shape[1] // BLOCKS[ggml_type][1] * BLOCKS[ggml_type][0]
    assert {p: (a.shape, a.dtype.name) for p, a in parts.items()} == fmt.parts(n, k)
    ours = dequantize(parts, fmt, n, k)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ggml_type]).reshape(n, k)
    np.testing.assert_array_equal(ours, theirs)
    # The bits as well, but for the sign of a zero where the scale's sign was turned.
    same_bits = ours.view(np.uint32) == theirs.view(np.uint32)
    assert (same_bits | (theirs == 0)).all()
    if ggml_type not in ("Q4_0", "Q8_0"):
        assert same_bits.all()


@st.composite
def raw_blocks(draw: st.DrawFn, ggml_type: str) -> np.ndarray:
    """Any bytes, with any finite float16 numbers."""
    _, num_bytes, places = BLOCKS[ggml_type]
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw = rng.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    # As bits: of `st.floats(width=16)` hypothesis throws most away, and gives up at times.
    magnitude = st.integers(0, np.float16(np.finfo(np.float16).max).view(np.uint16).item())
    for place in places:
        bits = draw(hnp.arrays(np.uint16, (rows, blocks, 1), elements=magnitude))
        negative = draw(hnp.arrays(np.bool_, (rows, blocks, 1)))
        numbers = bits | negative.astype(np.uint16) << 15
        raw[:, :, place : place + 2] = numbers.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("ggml_type", BLOCKS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_blocks_equal_gguf(ggml_type: str, data: st.DataObject) -> None:
    assert_equals_gguf(data.draw(raw_blocks(ggml_type)), ggml_type)


@pytest.mark.parametrize("ggml_type", BLOCKS)
def test_random_blocks_equal_gguf(
    ggml_type: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit pattern, over several chunks of rows."""
    block_size, num_bytes, places = BLOCKS[ggml_type]
    raw = rng.integers(0, 256, (100, 1024 // block_size, num_bytes), dtype=np.uint8)
    for place in places:
        numbers = rng.standard_normal(raw.shape[:2])[..., None].astype(np.float16)
        raw[:, :, place : place + 2] = numbers.view(np.uint8)
    raw = raw.reshape(100, -1)
    monkeypatch.setattr(module, "_CHUNK_BLOCK_BYTES", 7 * raw.shape[1])
    assert_equals_gguf(raw, ggml_type)


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_equal_gguf(ggml_type: str, rng: np.random.Generator) -> None:
    weight = rng.standard_normal((16, 96)).astype(np.float32)
    weight[0] = 0
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[ggml_type])
    assert_equals_gguf(raw, ggml_type)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_q4_0_and_q8_0_are_mlc_formats() -> None:
    assert format_for("Q4_0") == find_scheme("q4f16_1").linear
    assert format_for("Q8_0") == find_scheme("q8f16_1").linear


def test_q4_0_turns_values_and_scale() -> None:
    block = np.array([2.0], np.float16).view(np.uint8).tolist() + [0x51] * 16
    _, parts = import_blocks(np.array([block], np.uint8), "Q4_0", name="w")
    q = unpack_values(parts, format_for("Q4_0"), 1, 32)
    assert q.tolist() == [[15 - 1] * 16 + [15 - 5] * 16]
    assert parts["q_scale"].tolist() == [[-2.0]]


def test_q8_0_with_minus_128_stays_in_the_format() -> None:
    """-128 + 127 would be negative: that block, and only that one, is turned."""
    blocks = np.zeros((1, 2, 34), np.uint8)
    blocks[:, :, :2] = np.array([0.5], np.float16).view(np.uint8)
    blocks[0, 0, 2:6] = np.array([-127, 127, 0, 5], np.int8).view(np.uint8)
    blocks[0, 1, 2:6] = np.array([-128, 127, 0, 5], np.int8).view(np.uint8)
    raw = blocks.reshape(1, -1)
    fmt, parts = import_blocks(raw, "Q8_0", name="w")
    assert parts["q_scale"].tolist() == [[0.5, -0.5]]
    q = unpack_values(parts, fmt, 1, 64)
    assert q[0, [0, 1, 2, 3]].tolist() == [0, 254, 127, 132]
    assert q[0, [32, 33, 34, 35]].tolist() == [255, 0, 127, 122]
    assert_equals_gguf(raw, "Q8_0")


def test_rows_of_a_memory_map_need_not_be_aligned() -> None:
    raw = np.arange(1 + 4 * 22, dtype=np.uint8)[1:].reshape(4, 22)
    raw.flags.writeable = False
    assert_equals_gguf(raw, "Q5_0")


def test_unknown_type() -> None:
    with pytest.raises(CheckpointError, match=r"IQ2_XS is not supported; supported: F32.*Q6_K"):
        format_for("IQ2_XS")
    with pytest.raises(CheckpointError, match="Q2_K is not supported"):
        import_blocks(np.zeros((1, 84), np.uint8), "Q2_K", name="w")


@pytest.mark.parametrize("row_bytes", [0, 17, 19])
def test_partial_blocks(row_bytes: int) -> None:
    with pytest.raises(CheckpointError, match=f"tensor blk.0 has rows of {row_bytes} bytes"):
        import_blocks(np.zeros((2, row_bytes), np.uint8), "Q4_0", name="blk.0")


@pytest.mark.parametrize("ggml_type", BLOCKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_must_be_finite(ggml_type: str, bad: float) -> None:
    _, num_bytes, places = BLOCKS[ggml_type]
    for place in places:
        raw = np.full((1, num_bytes), 1, np.uint8)
        raw[0, place : place + 2] = np.array([bad], np.float16).view(np.uint8)
        with pytest.raises(CheckpointError, match=f"tensor w holds a {ggml_type} block whose"):
            import_blocks(raw, ggml_type, name="w")


def test_formats() -> None:
    """Sub-scales multiplied out need float32; the rest keeps the file's float16."""
    assert format_for("Q4_K") == TensorFormat("float32", 4, 32)
    assert format_for("Q5_K") == TensorFormat("float32", 5, 32)
    assert format_for("Q6_K") == TensorFormat("float32", 6, 16, zero_point=32)
    assert format_for("Q5_0") == TensorFormat("float16", 5, 32, zero_point=16)
