"""Workers answer, and one that fails is named."""

import sys

import pytest
from everycast.benchmarks.workers import Worker, WorkerError
from everycast.benchmarks.works import WORKS, num_tokens, random_prompt

ECHO = """
import sys
print("loading", flush=True)
print('{"version": 1}', flush=True)
for line in sys.stdin:
    print('{"work": "%s"}' % line.strip(), flush=True)
"""


def test_a_worker_says_it_is_ready_and_does_each_work() -> None:
    with Worker("echo", [sys.executable, "-c", ECHO]) as worker:
        assert worker.ready == {"version": 1}
        assert [worker.measure(work)["work"] for work in WORKS] == list(WORKS)


def test_a_worker_that_ends_is_an_error_with_its_name() -> None:
    with pytest.raises(WorkerError, match="broken ended with exit code 3"):
        Worker("broken", [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("work", WORKS)
def test_prompts_are_the_same_for_every_engine_and_new_in_every_round(work: str) -> None:
    prompt = random_prompt(work, 1000, seed=1)
    assert prompt == random_prompt(work, 1000, seed=1)
    assert prompt != random_prompt(work, 1000, seed=2)
    assert len(prompt) == (16 if work == "decode" else num_tokens(work))
    assert all(0 <= token < 1000 for token in prompt)
