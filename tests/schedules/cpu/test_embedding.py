import numpy as np
import pytest
from everycast.artifact.tensor_format import TensorFormat
from everycast.schedules.cpu.embedding import embedding
from everycast.schedules.cpu.packing import PackedWeight

FORMATS = [
    TensorFormat("float32"),
    TensorFormat("float16"),
    TensorFormat("bfloat16"),
    TensorFormat("float16", 4, 32, 7, "KN"),
    TensorFormat("float16", 4, 64, None),
    TensorFormat("float16", 8, 32, 127),
    TensorFormat("bfloat16", 5, 32, None),
    TensorFormat("float32", 6, 16, 32),
    TensorFormat("float16", 3, 40, 3),
]


TABLES = [(fmt, False) for fmt in FORMATS] + [(TensorFormat("float16", 8, 32, 127), True)]


@pytest.mark.parametrize("k", [90, 91])
@pytest.mark.parametrize(("fmt", "planes"), TABLES, ids=str)
def test_rows(lab, fmt, planes, k):
    table = PackedWeight(fmt, 37, k, planes)
    packed, values = lab.random_weight(table, lab.rng)
    kernel = lab.build(embedding(table, 1.5))
    for m in (1, 5, 300):
        ids = lab.rng.integers(0, table.n, m).astype("int32")
        y = lab.tensor(np.zeros((m, table.k), "float32"))
        kernel(lab.tensor(ids), packed, y)
        np.testing.assert_allclose(y.numpy(), 1.5 * values[ids], rtol=1e-5, atol=1e-4)
