import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from everycast.engine import threads
from everycast.engine.threads import candidates, choose_threads, prepare_pools, usable_cpus

FORWARD = """
import hashlib, sys
from pathlib import Path
import numpy as np
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner
from everycast.engine.parameters import load_parameters
from everycast.engine.runtime import num_threads
from everycast.engine.thread_governor import ThreadGovernor
from everycast.engine.threads import set_threads

artifact = open_artifact(Path(sys.argv[1]))
parameters = load_parameters(artifact.folder, artifact.library, artifact.weights)
runner = PagedRunner(artifact.library, parameters, artifact.info, 16)
# As if no CPU were ever lost: all threads in every step.
runner._governor = ThreadGovernor(runner._settle_threads(), set_threads, preemptions=lambda: 0)
ids = np.arange(40, dtype=np.int32)
prompt = StepInput(ids, ids, np.array([0, 40], np.int32), np.arange(3, dtype=np.int32)[None], ids)
digest = hashlib.sha256()
for _ in range(int(sys.argv[2])):
    digest.update(runner.execute(prompt).tobytes())
    for i in range(40, 45):
        one = np.array([i], np.int32)
        step = StepInput(one, one, np.array([0, 1], np.int32), prompt.block_tables, one * 0)
        digest.update(runner.execute(step).tobytes())
print(num_threads(), digest.hexdigest())
"""


def forward(artifact: Path, num_threads: int) -> list[str]:
    """Threads that ran, and a digest of the logits of 8 prompts and the tokens after each.

    With more threads than CPUs, beside other work, every loop may take a time slice of each.
    """
    command = [sys.executable, "-c", FORWARD, str(artifact), "8"]
    environment = {**os.environ, "TVM_NUM_THREADS": str(num_threads)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.split()


def test_logits_do_not_depend_on_the_number_of_threads(tiny_artifact: Path, tmp_path: Path) -> None:
    """Also with more threads than CPUs, and while others use these: threads then come late to the
    loops they share, and find their share done by others."""
    artifact = shutil.copytree(tiny_artifact, tmp_path / "artifact")
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            sum(range(1000))

    alone, digest = forward(artifact, 1)
    assert alone == "1"
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for count in (2, 3, 7):
            assert forward(artifact, count) == [str(count), digest]
    finally:
        stop.set()
        disturber.join()


@pytest.mark.parametrize(
    ("num_cpus", "num_cores", "expected"),
    [
        (1, 1, [1]),
        (2, 2, [2]),
        (2, 1, [1, 2]),
        (8, 4, [4, 8]),
        (16, 8, [4, 8, 16]),
        (2, 32, [2]),  # a quota of 2 CPUs
    ],
)
def test_candidates(num_cpus: int, num_cores: int, expected: list[int]) -> None:
    assert candidates(num_cpus, num_cores) == expected


def test_usable_cpus_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_QUOTA", quota)
    assert usable_cpus() == 12
    for text, expected in (("max 100000", 12), ("250000 100000", 2), ("5000 100000", 1)):
        quota.write_text(text)
        assert usable_cpus() == expected


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    monkeypatch.setenv("TVM_BIND_THREADS", "1")
    prepare_pools()
    assert os.environ["TVM_NUM_THREADS"] == "3" and os.environ["TVM_BIND_THREADS"] == "1"


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of 8 cores with two threads each; what pools were set to."""
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path))
    monkeypatch.setenv("TVM_NUM_THREADS", "16")
    monkeypatch.setattr(threads, "usable_cpus", lambda: 16)
    monkeypatch.setattr(threads, "physical_cores", lambda: 8)
    sizes: list[int] = []

    def set_threads(count: int) -> int:
        sizes.append(count)
        return count

    monkeypatch.setattr(threads, "set_threads", set_threads)
    return sizes


def clock(monkeypatch: pytest.MonkeyPatch, pools: list[int]) -> Callable[[], None]:
    """A step that is fastest with 8 threads, on a clock of its own."""
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])

    def step() -> None:
        now[0] += {4: 0.02, 8: 0.01, 16: 0.03}[pools[-1]]

    return step


def test_the_fastest_is_kept_for_the_next_start(
    pools: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = clock(monkeypatch, pools)
    assert choose_threads(step, "library") == 8
    assert pools == [4, 8, 16, 8]
    assert choose_threads(step, "library") == 8
    assert pools[4:] == [8]  # not tried again
    assert choose_threads(step, "another") == 8 and len(pools) > 6
    (tmp_path / "threads.json").write_text("[1")
    assert choose_threads(step, "library") == 8  # a spoilt file is made anew
    assert set(json.loads((tmp_path / "threads.json").read_text()).values()) == {8}


def test_a_number_in_the_environment_is_not_questioned(
    pools: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "5")
    assert choose_threads(lambda: None, "library") == 5 and pools == [5]
