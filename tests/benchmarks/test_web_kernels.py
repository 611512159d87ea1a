"""The browser benchmark's own parts: its baseline's kernels, and its report."""

import argparse

import pytest
import tvm
from everycast.artifact.tensor_format import TensorFormat
from everycast.benchmarks import web_kernels


@pytest.mark.parametrize("one_row", [True, False])
def test_dlight_schedules_the_kernels_of_the_baseline(one_row: bool) -> None:
    with tvm.target.Target("webgpu"):
        func = web_kernels._linear(
            TensorFormat("float32", 4, 32, 7), 96, 64, bias=False, residual=True, one_row=one_row
        )
    assert func.attrs["tirx.is_scheduled"] and "threadIdx.x" in func.script()


def test_report_has_medians_and_ratios() -> None:
    def times(prefill: float, decode: float) -> dict:
        return {
            phase: {
                "a_kernel": {"starts": 2, "ms": ms / 2},
                "b_kernel": {"starts": 1, "ms": ms / 2},
            }
            for phase, ms in (("prefill", prefill), ("decode", decode))
        }

    rounds = {
        "dlight": [times(800, 300), times(900, 320), times(850, 990)],
        "everycast": [times(200, 32), times(100, 30), times(90, 31)],
    }
    fact = {"bytes_downloaded": 84e6, "library_bytes": 4.6e6, "load_ms": 5000}
    facts = {
        "dlight": {**fact, "first_token_ms": 900},
        "everycast": {**fact, "first_token_ms": 300},
    }
    adapter = {"vendor": "google", "architecture": "swiftshader"}
    options = argparse.Namespace(model="m", prompt_tokens=64, rounds=3)
    report = web_kernels._report(options, adapter, facts, rounds)
    assert "| prefill, all kernels | 850 | 100 | 8.5 |" in report
    assert "| decode, all kernels | 320 | 31 | 10.3 |" in report
    assert "| time to first token | 900 | 300 | 3.0 |" in report
    assert "| bytes downloaded | 84.0 MB |" in report
    assert "| `a_kernel` | 2 | 45.0 |" in report
