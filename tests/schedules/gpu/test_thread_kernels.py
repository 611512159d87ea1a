"""RMSNorm and attention that a thread does by itself."""

import numpy as np
import pytest
from everycast.schedules.gpu.attention_block import AttentionShape
from everycast.schedules.gpu.thread_kernels import thread_attention, thread_rms_norm

PAGE, LAYERS, LAYER = 16, 2, 1
SEQUENCES = ((0, 1), (15, 1), (16, 2), (37, 5))
"""(tokens before, new tokens)"""


@pytest.mark.parametrize("size", [1, 5, 576])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(gpu, size, has_residual):
    x, residual = gpu.rng.standard_normal((2, 7, size)).astype("float32")
    weight = gpu.rng.standard_normal(size).astype("float32")
    tensors = [x, weight, *([residual] if has_residual else [])]
    func = thread_rms_norm(size, 1e-5, has_residual)
    *_, y = gpu.run(func, *tensors, np.zeros_like(x))
    expected = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(y, expected + has_residual * residual, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "window", "softcap"),
    [
        (9, 3, 64, "float32", None, None),
        (4, 1, 12, "float16", 8, None),
        (3, 3, 80, "float32", 20, 3.0),
    ],
)
def test_attention(gpu, heads, kv_heads, dim, dtype, window, softcap):
    shape = AttentionShape(heads, kv_heads, dim, PAGE, dtype)
    rng, scale = gpu.rng, 0.3
    counts = [count for _, count in SEQUENCES]
    ids = np.repeat(np.arange(len(SEQUENCES)), counts)
    positions = np.concatenate([past + np.arange(n) for past, n in SEQUENCES]).astype("int32")
    num_pages = 4 * len(SEQUENCES)
    tables = rng.permutation(num_pages).reshape(len(SEQUENCES), 4).astype("int32")
    pages = rng.standard_normal((LAYERS, num_pages, 2 * kv_heads, PAGE * dim)).astype(dtype)
    q = rng.standard_normal((len(ids), heads * dim)).astype("float32")
    tiles = np.stack([ids, np.arange(len(ids)), np.ones(len(ids))], axis=1).astype("int32")
    func = thread_attention(shape, scale, window, softcap=softcap)
    out = gpu.run(func, q, pages, tables, positions, tiles, LAYER, np.zeros_like(q))[-1]

    whole = pages[LAYER].astype(float)
    for i, sequence in enumerate(ids):
        own = whole[tables[sequence]]
        first = 0 if window is None else max(0, positions[i] - window + 1)
        seen = slice(first, positions[i] + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            keys = own[:, kv_head].reshape(-1, dim, PAGE).transpose(0, 2, 1).reshape(-1, dim)
            values = own[:, kv_heads + kv_head].reshape(-1, dim)
            scores = keys[seen] @ q[i, head * dim : (head + 1) * dim] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ values[seen]
            got = out[i, head * dim : (head + 1) * dim]
            np.testing.assert_allclose(got, expected, atol=2e-5)
