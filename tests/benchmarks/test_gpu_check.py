"""The check of a GPU, on Vulkan: what is printed, and what makes it fail."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import EverycastError
from everycast.benchmarks import gpu_check, gpu_peers
from everycast.benchmarks.gpu_check_files import CHECK_JSON, EXPECTED, STEPS
from everycast.benchmarks.gpu_check_run import check_numerics
from everycast.benchmarks.workers import BenchError
from everycast.engine.devices import DeviceMemory

SCRIPT = Path(gpu_check.__file__).with_name("gpu_check.sh")
OPTIONS = ["--device", "vulkan", "--shape", "tiny", "--works", "decode,prefill_128,batch_4"]
CASE = "llama, q4f16_1"
RUN = """
import sys
from everycast.benchmarks.gpu_check import main
code = main(sys.argv[1:])
assert "tvm" not in sys.modules
sys.exit(code)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled by the script."""
    try:
        DeviceMemory("vulkan")
    except EverycastError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("check")
    command = ["sh", str(SCRIPT), *OPTIONS, "--cases", "1", "--prepare", str(folder)]
    run = subprocess.run(
        command, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, text=True,
        capture_output=True,
    )  # fmt: skip
    if "which is not installed; run: " in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("compiled for vulkan in ")
    return folder


def test_what_was_prepared_runs_without_a_compiler(prepared: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = [*OPTIONS, "--prepared", str(prepared), "--json", str(found)]
    run = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *options], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("device: vulkan:0 (") and run.stdout.endswith("all right\n")
    assert "measured: reads " in run.stdout and "% of what" in run.stdout
    results: dict[str, Any] = json.loads(found.read_text())
    assert [step["step"] for step in results["numerics"]] == [step.what for step in STEPS]
    assert all(step["error"] < 1e-2 for step in results["numerics"])
    assert list(results["speed"]) == [
        f"tiny/everycast/{work}" for work in ("decode", "prefill_128", "batch_4")
    ]
    assert all(0 < speed["percent"] < 150 for speed in results["speed"].values())


def test_what_was_prepared_for_other_devices_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECK_JSON).write_text('{"target": "cuda:sm_90"}')
    with pytest.raises(BenchError, match=r"was prepared for cuda:sm_90, not for vulkan; prepare"):
        gpu_check._read(tmp_path, "vulkan")
    assert gpu_check._read(tmp_path, "cuda")["target"] == "cuda:sm_90"


def test_a_wrong_kernel_is_found(prepared: Path) -> None:
    path = prepared / "cases" / CASE / EXPECTED
    with np.load(path) as file:
        expected = [file[name] for name in file]
    expected[3] = expected[3] + 0.1 * np.abs(expected[3]).max()
    np.savez(path, *expected)
    checked = list(check_numerics(prepared, CASE, "vulkan"))
    assert [step.is_right for step in checked] == [True] * 3 + [False] + [True] * 2


def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "best_kind", lambda: "cpu")
    for options, message in (
        ([], "there is no GPU here; name a device"),
        (["--shape", "llama-3.2"], "there is no shape 'llama-3.2'; did you mean"),
        (["--device", "cdua"], "did you mean cuda?"),
        (["--works", "decode,fast"], "there is no work 'fast'"),
        (["--works", "decode,memory"], "memory is no work of this check"),
        (["--device", "vulkan", "--prepare", __file__, "--shape", "tiny"], "File exists"),
        (["--device", "vulkan:9", "--prepared", str(tmp_path)], "vulkan"),
    ):
        assert gpu_check.main(options) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_torch_as_a_peer() -> None:
    """On the CPU here."""
    pytest.importorskip("torch")
    deadline = time.monotonic() + 120
    with gpu_peers.start_worker(gpu_peers.TORCH, gpu_check.TINY, "cpu", deadline) as worker:
        for work, tokens in (("decode", 128), ("prefill_16", 16), ("batch_2", 128)):
            answer = worker.measure(work, rest_s=0)
            assert answer["tokens"] == tokens and answer["seconds"] > 0
        assert worker.measure(gpu_peers.PEAK, rest_s=0)["tokens"] == 2 * 2 * 256**3


def test_peers_are_for_gpus_that_they_have() -> None:
    arguments = (gpu_check.TINY, "vulkan", ["decode"], time.monotonic() + 9, print)
    assert [list(gpu_peers.measure_peer(peer, *arguments)) for peer in gpu_peers.PEERS] == [[], []]
    assert gpu_peers.matrix_peak("vulkan", print) is None
