"""The loop in its own thread: many clients at once, aborts at any moment, shutdown."""

import random
import threading
import time
from dataclasses import replace

import pytest
from everycast.artifact.errors import EverycastError
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import RecordingSink, ScriptedModel, hash_script
from everycast.engine.sequence import Request

VOCAB = 50
NUM_CLIENTS = 64
NUM_TOKENS = 24
TIMEOUT_S = 30.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
LIMITS = ScheduleLimits(
    max_num_sequence=16,
    prefill_chunk_size=32,
    context_window_size=64,
    page_size=4,
    num_pages=48,  # too few for 16 sequences: preemptions are part of it
)


def make_loop(*, step_time_s: float = 0.0) -> EngineLoop:
    model = ScriptedModel(
        hash_script(VOCAB),
        vocab_size=VOCAB,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
        step_time_s=step_time_s,
    )
    return EngineLoop(model, LIMITS)


def prompt_of(client: int) -> tuple[int, ...]:
    return (1, 2, 3, 4, 5, *range(client % 7), client % VOCAB)


def text_of(prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    script, history = hash_script(VOCAB), prompt
    for _ in range(num_tokens):
        history = (*history, script(history))
    return list(history[len(prompt) :])


@pytest.mark.parametrize("abort_every", [0, 2])
def test_many_clients_at_once(abort_every: int) -> None:
    loop = make_loop()
    loop.start()
    rng = random.Random(abort_every)
    delays = [rng.uniform(0.0, 0.3) for _ in range(NUM_CLIENTS)]
    sinks = [RecordingSink() for _ in range(NUM_CLIENTS)]
    start = threading.Barrier(NUM_CLIENTS)

    def client(i: int) -> None:
        start.wait()
        loop.submit(Request(str(i), prompt_of(i), GREEDY), sinks[i])
        if abort_every and i % abort_every == 0:
            time.sleep(delays[i])
            loop.abort(str(i))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, sink in enumerate(sinks):
        assert sink.is_finished.wait(TIMEOUT_S), f"client {i} got no end"
        expected = text_of(prompt_of(i))
        if sink.finish_reasons == {0: "abort"}:
            assert abort_every and i % abort_every == 0
            expected = expected[: len(sink.token_ids[0])]
        else:
            assert sink.finish_reasons == {0: "length"}
        assert sink.token_ids[0] == expected
    metrics = loop.metrics()
    assert metrics.num_available_pages == metrics.num_pages
    assert metrics.num_preemptions > 0 or abort_every
    counters = metrics.counters
    assert counters.num_failed_requests == 0 and counters.num_requests == NUM_CLIENTS
    assert counters.num_finished_requests + counters.num_aborted_requests == NUM_CLIENTS
    loop.shutdown()
    loop.scheduler.check_integrity()


def test_abort_in_the_very_step_a_request_ends() -> None:
    loop = make_loop()
    loop.start()
    for i in range(200):
        sink = RecordingSink()
        loop.submit(Request(str(i), (1, 2, 3), replace(GREEDY, max_tokens=1)), sink)
        loop.abort(str(i))
        assert sink.is_finished.wait(TIMEOUT_S)
        assert sink.finish_reasons[0] in ("abort", "length")
    assert loop.metrics().num_available_pages == LIMITS.num_pages
    loop.shutdown()


def test_an_idle_loop_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    num_calls = 0
    step = loop.step

    def counting_step() -> bool:
        nonlocal num_calls
        num_calls += 1
        return step()

    monkeypatch.setattr(loop, "step", counting_step)
    loop.start()
    sink = RecordingSink()
    loop.submit(Request("a", (1, 2), GREEDY), sink)
    assert sink.is_finished.wait(TIMEOUT_S)
    time.sleep(0.02)
    num_calls_before = num_calls
    time.sleep(0.1)
    assert num_calls == num_calls_before == NUM_TOKENS
    loop.shutdown()


def test_shutdown_ends_what_runs_and_refuses_what_comes() -> None:
    loop = make_loop(step_time_s=0.01)
    loop.start()
    sinks = [RecordingSink() for _ in range(30)]
    for i, sink in enumerate(sinks):
        loop.submit(Request(str(i), prompt_of(i), GREEDY), sink)
    time.sleep(0.05)
    loop.shutdown()
    loop.shutdown()
    assert all(sink.is_finished.is_set() for sink in sinks)
    assert {reason for sink in sinks for reason in sink.finish_reasons.values()} == {"abort"}
    assert loop.metrics().num_available_pages == LIMITS.num_pages
    assert loop._runner.is_closed  # type: ignore[attr-defined]
    with pytest.raises(EverycastError, match="shut down"):
        loop.submit(Request("late", (1,), GREEDY), RecordingSink())


def test_a_loop_that_never_started_can_be_shut_down() -> None:
    loop = make_loop()
    sink = RecordingSink()
    loop.submit(Request("a", (1, 2), GREEDY), sink)
    loop.shutdown()
    assert sink.finish_reasons == {0: "abort"}
