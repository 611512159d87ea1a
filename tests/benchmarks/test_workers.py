"""Workers answer; one that fails, hangs or cannot do a work is named in one line."""

import io
import json
import sys
from pathlib import Path

import pytest
from everycast.benchmarks import worker_loop
from everycast.benchmarks.workers import Worker, WorkerError, WorkRefusedError

ECHO = """
import sys
print("loading", flush=True)
print('{"version": 1}', flush=True)
for line in sys.stdin:
    if "refuse" in line: print('{"error": "no such thing"}', flush=True)
    elif "end" in line: sys.exit(7)
    else: print('{"work": "%s"}' % line.strip(), flush=True)
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_a_worker_says_it_is_ready_and_does_each_work() -> None:
    with Worker("echo", python(ECHO)) as worker:
        assert worker.ready == {"version": 1}
        works = ["decode", "prefill_128"]
        assert [worker.measure(work, rest_s=0)["work"] for work in works] == works


def test_a_worker_gets_its_environment() -> None:
    script = "import os; print('{\"threads\": %s}' % os.environ['TVM_NUM_THREADS'])"
    with Worker("w", python(script), {"TVM_NUM_THREADS": "3"}) as worker:
        assert worker.ready == {"threads": 3}


def test_a_work_that_is_refused_leaves_the_worker_alive() -> None:
    with Worker("echo", python(ECHO)) as worker:
        with pytest.raises(WorkRefusedError, match="echo cannot do refuse: no such thing"):
            worker.measure("refuse", rest_s=0)
        assert worker.measure("decode", rest_s=0) == {"work": "decode"}


def test_a_worker_that_ends_is_an_error_with_its_name() -> None:
    with pytest.raises(WorkerError, match=r"^broken ended with exit code 3$"):
        Worker("broken", python("raise SystemExit(3)"))
    with Worker("echo", python(ECHO)) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match="echo ended with exit code 7"):
                worker.measure("end", rest_s=0)
        with pytest.raises(WorkRefusedError):
            worker.memory()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import sys; sys.exit('it cannot load m.gguf')", "it cannot load m.gguf"),
        ("import sys; sys.stderr.write('GGML_ASSERT(1) failed\\n#1 main\\n'); sys.exit(1)",
         r"GGML_ASSERT\(1\) failed"),
    ],
)  # fmt: skip
def test_the_reason_is_what_it_said_on_standard_error(script: str, reason: str) -> None:
    with pytest.raises(WorkerError, match=f"exit code 1: {reason}$"):
        Worker("broken", python(script))


def test_a_worker_that_hangs_is_ended() -> None:
    with pytest.raises(WorkerError, match="slow did not answer within 0 s"):
        Worker("slow", python("import time; time.sleep(60)"), timeout_s=0.2)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(WorkerError, match="none cannot be started"):
        Worker("none", ["/nowhere/python"])


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_memory_of_the_process() -> None:
    script = "data = bytearray(b'x') * 100_000_000; print('{}', flush=True); input()"
    with Worker("w", python(script)) as worker:
        memory = worker.memory()
    assert 100e6 < memory.peak_rss < 250e6 and 100e6 < memory.pss <= memory.peak_rss


def answers(
    lines: str, run: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, object]]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    worker_loop.answer_works({"ready": True}, run)  # type: ignore[arg-type]
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_loop_warms_a_work_up_once_and_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, int]] = []

    def run(work: str, seed: int) -> tuple[int, float]:
        calls.append((work, seed))
        if work == "bad":
            raise RuntimeError("two\nlines")
        return 10, 2.0

    said = answers("decode\nbad\ndecode\nstart\n", run, monkeypatch, capsys)
    done = {"tokens": 10, "seconds": 2.0}
    assert said == [{"ready": True}, done, {"error": "RuntimeError: two lines"}, done, done]
    assert calls == [("decode", 0), ("decode", 1), ("bad", 2), ("decode", 3), ("start", 4)]
