"""The packed layout against a NumPy packer written from the picture in `packing`."""

import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.quant_schemes.bits import from_layout, pack_values, unpack_values
from everycast.schedules.cpu.packing import PackedWeight
from hypothesis import given
from hypothesis import strategies as st

FORMATS = [
    TensorFormat("float32"),
    TensorFormat("float16"),
    TensorFormat("bfloat16"),
    TensorFormat("float16", 4, 32, 7),
    TensorFormat("float16", 4, 32, 7, "KN"),
    TensorFormat("float32", 4, 32, None),
    TensorFormat("bfloat16", 4, 64, None),
    TensorFormat("float16", 8, 32, 127),
    TensorFormat("float16", 5, 32, None),
    TensorFormat("float32", 5, 32, 16, "KN"),
    TensorFormat("float16", 6, 16, 32),
    TensorFormat("float16", 3, 40, 3),
]


def rows_of_blocks(array, blocks, columns):
    """[n, c] → [blocks, columns, 16 rows], zeros beyond n and c."""
    padded = np.zeros((blocks * 16, columns), array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array[:, :columns]
    return np.ascontiguousarray(padded.reshape(blocks, 16, columns).transpose(0, 2, 1))


def planes_reference(weight, parts):
    """The three sections of a weight in two planes."""
    fmt, blocks, groups = weight.format, -(-weight.n // 16), 2 * -(-weight.k // 64)
    q = unpack_values(parts, fmt, weight.n, fmt.padded_k(weight.k))
    scales = np.repeat(from_layout(parts["q_scale"], fmt), fmt.group_size // 32, axis=1)
    upper = TensorFormat(fmt.dtype, 4, 32, 7)
    halves = []
    for values in (q >> 4, q & 15):
        nibbles = pack_values(np.ascontiguousarray(values), upper)
        nibbles["q_scale"] = scales
        halves.append(pack_reference(PackedWeight(upper, weight.n, q.shape[1]), nibbles))
    lower = halves[1].reshape(blocks, groups // 2, -1)[:, :, 2 * 16 * scales.itemsize :]
    squares = rows_of_blocks(scales.astype(np.float32) ** 2, blocks, groups).max(axis=2)
    padded = np.zeros((-(-blocks // 16) * 16, groups), np.float32)
    padded[:blocks] = squares
    squares = np.ascontiguousarray(padded.reshape(-1, 16, groups).transpose(0, 2, 1))
    return np.concatenate([halves[0], lower.reshape(-1), squares.reshape(-1).view(np.uint8)])


def pack_reference(weight, parts):
    if weight.planes:
        return planes_reference(weight, parts)
    fmt, blocks, group = weight.format, -(-weight.n // 16), weight.group
    if weight.is_bfloat16:
        words = -(-weight.k // 2)
        pairs = np.zeros((weight.n, words, 2), "uint16")
        pairs.reshape(weight.n, -1)[:, : weight.k] = parts["weight"].view("uint16")
        pairs = pairs.view("uint32")[..., 0]
        return rows_of_blocks(pairs, blocks, words).reshape(-1).view(np.uint8)
    if fmt.bits is None:
        return rows_of_blocks(parts["weight"], blocks, weight.k).reshape(-1).view(np.uint8)
    num_groups = 2 * -(-weight.k // (2 * group))
    q = unpack_values(parts, fmt, weight.n, fmt.padded_k(weight.k))
    q = rows_of_blocks(q, blocks, num_groups * group).reshape(blocks, num_groups, group, 16)
    if fmt.bits <= 4:
        q = q[:, :, : group // 2] | q[:, :, group // 2 :] << 4
    q = q.reshape(blocks, num_groups, -1, 4, 16).transpose(0, 1, 2, 4, 3)
    sections = []
    for part in ("q_scale", "q_min"):
        if part in parts:
            vector = np.repeat(from_layout(parts[part], fmt), fmt.group_size // group, axis=1)
            vector = rows_of_blocks(vector, blocks, num_groups)
            sections.append(vector.view(np.uint8).reshape(blocks, num_groups // 2, -1))
    sections.append(q.reshape(blocks, num_groups // 2, -1))
    return np.concatenate(sections, axis=2).reshape(-1)


PLANES = [
    TensorFormat("float16", 8, 32, 127),
    TensorFormat("float32", 8, 64, 128, "KN"),
]
STORED = [(fmt, False) for fmt in FORMATS] + [(fmt, True) for fmt in PLANES]


@pytest.mark.parametrize("k", [1, 167, 168])
@pytest.mark.parametrize(("fmt", "planes"), STORED, ids=str)
def test_pack_func_matches_numpy(lab, fmt, planes, k):
    weight = PackedWeight(fmt, 37, k, planes)
    parts = lab.random_parts(fmt, weight.n, weight.k, lab.rng)
    packed = lab.pack(weight, parts).numpy()
    np.testing.assert_array_equal(packed, pack_reference(weight, parts))


@given(
    st.sampled_from(FORMATS),
    st.integers(1, 70),
    st.integers(1, 300),
)
def test_sizes(fmt, n, k):
    weight = PackedWeight(fmt, n, k)
    assert weight.num_blocks * 16 >= n > weight.num_blocks * 16 - 16
    stored = sum(
        int(np.prod(shape)) * (2 if dtype in ("float16", "bfloat16") else 4)
        for shape, dtype in fmt.parts(n, k).values()
    )
    if fmt.bits in (None, 4, 8) and fmt.group_size == 32 and n % 16 == 0 and k % 64 == 0:
        assert weight.num_bytes == stored
    if fmt.bits is not None:
        assert weight.pair_bytes % 64 == weight.q_offset % 64 == 0


def test_keys_tell_weights_apart():
    weights = [
        PackedWeight(fmt, n, k, planes) for fmt, planes in STORED for n, k in ((16, 64), (64, 16))
    ]
    # The portable layout is no property of the packed form.
    assert len({weight.key for weight in weights}) == len(weights) - 2


@pytest.mark.parametrize(
    "fmt",
    [
        TensorFormat("float16", 4, 32, 7),
        TensorFormat("float16", 8, 32, None),
        TensorFormat("bfloat16", 8, 32, 127),
    ],
    ids=str,
)
def test_formats_without_planes(fmt):
    with pytest.raises(ValueError, match="two planes are for 8-bit symmetric formats"):
        PackedWeight(fmt, 16, 64, planes=True)


def test_unsupported_group():
    with pytest.raises(ValueError, match=r"group_size 20: .* multiple of 8"):
        PackedWeight(TensorFormat("float16", 3, 20, 3), 16, 64)
