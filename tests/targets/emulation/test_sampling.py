"""Draws by the kernels that CUDA and Metal get, emulated, against their definition in NumPy."""

import math

import numpy as np
import pytest
from everycast.engine import numpy_sampling as oracle
from everycast.engine.device_sampling import device_settings
from everycast.schedules.gpu.limits import GpuLimits
from everycast.schedules.gpu.sampling import sampling_functions

SIZE = 300
LIMITS = GpuLimits(max_threads=256, shared_bytes=32 << 10, subgroup=32)
LOG2_E = math.log2(math.e)
SETTINGS = [
    # (1 / temperature, in powers of two; least logit below the largest; top_k; top_p; uniform)
    (0.0, -math.inf, 0.0, 1.0, 0.5),  # the largest
    *((LOG2_E, -math.inf, 0.0, 1.0, u) for u in (0.0, 0.31, 0.77)),
    (LOG2_E / 0.7, -math.inf, 5.0, 1.0, 0.6),
    (LOG2_E / 2, -math.inf, 0.0, 0.8, 0.43),
    (LOG2_E, math.log(0.05), 40.0, 0.9, 0.9),
]


@pytest.mark.parametrize("language", ["cuda", "metal"])
def test_draws(request, language):
    function = sampling_functions(SIZE, LIMITS)["sample_from_logits"]
    program = request.getfixturevalue(f"{language}_emulator").Emulated([function])
    logits = (np.random.default_rng(0).standard_normal((2, SIZE)) * 3).astype("float32")
    logits[1, ::3] = -np.inf
    rows = np.array([0, 1] * len(SETTINGS), "int32")
    values = np.repeat(np.array(SETTINGS), 2, axis=0)
    name = str(function.attrs["global_symbol"])
    ids = np.full(len(rows), -7, "int32")
    *_, drawn = program.run(name, logits, rows, device_settings(values), SIZE, ids)
    program.close()
    expected = oracle.sample_from_logits(logits, rows, values, SIZE)
    np.testing.assert_array_equal(drawn, expected)
