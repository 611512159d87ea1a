"""The scheduler's rules, one by one, without a model."""

import pytest
from everycast.artifact.errors import RequestError
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scheduler import MAX_PROMPT_ROWS, Scheduler, StepPlan
from everycast.engine.sequence import Request, Sequence, SequenceStatus


def make_scheduler(
    *,
    num_pages: int = 32,
    page_size: int = 4,
    chunk: int = 16,
    max_num_sequence: int = 4,
    context: int = 64,
    is_prefix_cache_enabled: bool = True,
) -> Scheduler:
    return Scheduler(
        ScheduleLimits(
            max_num_sequence=max_num_sequence,
            prefill_chunk_size=chunk,
            context_window_size=min(context, num_pages * page_size),
            page_size=page_size,
            num_pages=num_pages,
            is_prefix_cache_enabled=is_prefix_cache_enabled,
        )
    )


def request(name: str, prompt: range | list[int], params: SamplingParams | None = None) -> Request:
    return Request(name, tuple(prompt), params or SamplingParams())


def run(scheduler: Scheduler, *, token: int = 1) -> StepPlan:
    """One step in which every sampled sequence gets `token`."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    scheduler.commit(plan)
    for chunk in plan.chunks:
        if chunk.is_sampled:
            chunk.sequence.token_ids.append(token)
    scheduler.check_integrity()
    return plan


def sizes(plan: StepPlan) -> dict[str, int]:
    return {c.sequence.request.request_id: c.num_tokens for c in plan.chunks}


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    scheduler = make_scheduler(chunk=8)
    scheduler.add(request("a", range(4)))
    assert sizes(run(scheduler)) == {"a": 4}
    scheduler.add(request("b", range(100, 110)))
    scheduler.add(request("c", range(200, 206)))
    assert sizes(run(scheduler)) == {"a": 1, "b": 7}
    assert sizes(run(scheduler)) == {"a": 1, "b": 3, "c": 4}
    assert sizes(run(scheduler)) == {"a": 1, "b": 1, "c": 2}
    plan = run(scheduler)
    assert sizes(plan) == {"a": 1, "b": 1, "c": 1}
    assert all(chunk.is_decode for chunk in plan.chunks)


def test_only_the_last_chunk_of_a_prompt_is_sampled() -> None:
    scheduler = make_scheduler(chunk=4)
    scheduler.add(request("a", range(10)))
    assert [run(scheduler).chunks[0].is_sampled for _ in range(4)] == [False, False, True, True]


def test_admission_is_in_order_even_when_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_pages=8, chunk=32)
    running = scheduler.add(request("a", range(16)))
    run(scheduler)
    big = scheduler.add(request("big", range(100, 120)))
    small = scheduler.add(request("small", range(200, 202)))
    for _ in range(3):
        assert sizes(run(scheduler)) == {"a": 1}
    scheduler.finish(running, "stop")
    assert sizes(run(scheduler)) == {"big": 20, "small": 2}
    assert big.status is small.status is SequenceStatus.RUNNING


def test_no_more_sequences_than_allowed_run() -> None:
    scheduler = make_scheduler(max_num_sequence=2)
    for name in "abc":
        scheduler.add(request(name, [1, 2]))
    run(scheduler)
    assert len(scheduler.running) == 2 and len(scheduler.waiting) == 1


def test_the_youngest_is_preempted_and_comes_back_before_those_who_came_later() -> None:
    scheduler = make_scheduler(num_pages=5, chunk=16, context=20, is_prefix_cache_enabled=False)
    old = scheduler.add(request("old", range(4)))
    young = scheduler.add(request("young", range(50, 54)))
    late = scheduler.add(request("late", range(70, 86)))
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert young.status is SequenceStatus.WAITING and not young.block_table
    assert young.num_computed_tokens == 0 and young.num_output_tokens > 0
    assert list(scheduler.waiting) == [young, late]
    assert old.status is SequenceStatus.RUNNING
    scheduler.finish(old, "stop")
    plan = run(scheduler)
    assert sizes(plan) == {"young": len(young.token_ids) - 1}
    assert not plan.chunks[0].is_decode


def test_a_preempted_sequence_takes_its_pages_back_from_the_cache() -> None:
    scheduler = make_scheduler(num_pages=6, chunk=16, context=24)
    old = scheduler.add(request("old", range(8)))
    young = scheduler.add(request("young", range(50, 58)))
    while scheduler.num_preemptions == 0:
        run(scheduler)
    scheduler.finish(old, "stop")
    plan = run(scheduler)
    assert scheduler.num_prefix_hit_tokens > 0
    assert plan.num_tokens < len(young.token_ids) - 1
    assert young.num_cached_tokens == 0  # of its prompt nothing was saved at first


def test_a_prefix_is_shared_but_the_last_token_always_computed() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(request("a", range(8)))
    run(scheduler)
    scheduler.finish(first, "stop")
    second = scheduler.add(request("b", range(8)))
    assert sizes(run(scheduler)) == {"b": 4}
    assert second.num_cached_tokens == 4
    third = scheduler.add(request("c", [*range(8), 99]))
    assert sizes(run(scheduler)) == {"b": 1, "c": 1}
    assert third.num_cached_tokens == 8
    assert third.block_table[0] == second.block_table[0]


def test_the_prefix_cache_can_be_off() -> None:
    scheduler = make_scheduler(is_prefix_cache_enabled=False)
    first = scheduler.add(request("a", range(8)))
    run(scheduler)
    scheduler.finish(first, "stop")
    scheduler.add(request("b", range(8)))
    assert sizes(run(scheduler)) == {"b": 8}
    assert scheduler.pool.num_idle_pages == 0


def test_twins_computed_side_by_side_end_with_one_copy_of_their_pages() -> None:
    scheduler = make_scheduler(chunk=32)
    a = scheduler.add(request("a", range(9)))
    b = scheduler.add(request("b", range(9)))
    run(scheduler)
    assert a.block_table[:2] == b.block_table[:2] and a.block_table[2] != b.block_table[2]


def test_a_fork_shares_pages_and_copies_the_last_one_before_writing() -> None:
    scheduler = make_scheduler()
    parent = scheduler.add(request("a", range(6)))
    run(scheduler)
    children = [scheduler.fork(parent, i) for i in (1, 2)]
    assert all(child.block_table == parent.block_table for child in children)
    shared = parent.block_table[1]
    plan = run(scheduler)
    assert [source for source, _ in plan.page_copies] == [shared, shared]
    tables = [sequence.block_table for sequence in (parent, *children)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert tables[-1][1] == shared  # the last owner writes in place
    assert run(scheduler).page_copies == []


def test_a_fork_of_full_pages_copies_nothing() -> None:
    scheduler = make_scheduler()
    parent = scheduler.add(request("a", range(8)))
    run(scheduler)
    child = scheduler.fork(parent, 1)
    assert run(scheduler).page_copies == []
    assert child.block_table[:2] == parent.block_table[:2]
    assert child.block_table[2] != parent.block_table[2]


def test_a_fork_without_a_place_waits_by_age() -> None:
    scheduler = make_scheduler(max_num_sequence=2)
    parent = scheduler.add(request("a", range(6)))
    other = scheduler.add(request("b", range(50, 53)))
    late = scheduler.add(request("c", range(60, 63)))
    run(scheduler)
    child = scheduler.fork(parent, 1)
    assert list(scheduler.waiting) == [child, late]
    scheduler.finish(other, "stop")
    run(scheduler)
    assert scheduler.running == [parent, child]


def test_prompt_logprobs_are_cut_to_the_rows_of_a_step() -> None:
    scheduler = make_scheduler(num_pages=64, chunk=200, context=256)
    params = SamplingParams(prompt_logprobs=0)
    sequence = scheduler.add(request("a", range(150), params))
    other = scheduler.add(request("b", range(300, 340), params))
    rows: list[int] = []
    while sequence.num_output_tokens == 0:
        plan = run(scheduler)
        assert sum(len(chunk.prompt_rows) for chunk in plan.chunks) <= MAX_PROMPT_ROWS
        rows += [row for c in plan.chunks if c.sequence is sequence for row in c.prompt_rows]
    assert rows == list(range(149))
    assert other.num_prompt_rows_done > 0


def test_prompt_logprobs_do_not_reuse_pages_whose_logits_they_need() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(request("a", range(12)))
    run(scheduler)
    scheduler.finish(first, "stop")
    second = scheduler.add(request("b", range(12), SamplingParams(prompt_logprobs=0)))
    assert run(scheduler).chunks[0].prompt_rows == range(11)
    # After a preemption the rows that are done are not needed again.
    scheduler._preempt(second)
    plan = run(scheduler)
    assert sizes(plan) == {"b": 5} and not plan.chunks[0].prompt_rows


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param", "numbers"),
    [
        (129, None, "prompt", ("129", "128")),
        (1000, 5, "prompt", ("1000", "128")),
        (128, None, "prompt", ("128",)),
        (120, 50, "max_tokens", ("120", "50", "170", "128")),
        (128, 1, "max_tokens", ("128", "129")),
    ],
)
def test_what_never_fits_is_refused(
    num_prompt_tokens: int, max_tokens: int | None, param: str, numbers: tuple[str, ...]
) -> None:
    scheduler = make_scheduler(context=128)
    with pytest.raises(RequestError) as caught:
        scheduler.max_output_tokens(
            request("a", range(num_prompt_tokens), SamplingParams(max_tokens=max_tokens))
        )
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers)


def test_the_room_for_the_output() -> None:
    scheduler = make_scheduler(context=128)

    def room(num_prompt_tokens: int, max_tokens: int | None) -> int:
        params = SamplingParams(max_tokens=max_tokens)
        return scheduler.max_output_tokens(request("a", range(num_prompt_tokens), params))

    assert (room(120, None), room(120, 8), room(128, 0)) == (8, 8, 0)


def test_finishing_frees_at_once_and_twice_is_no_harm() -> None:
    scheduler = make_scheduler(is_prefix_cache_enabled=False)
    running = scheduler.add(request("a", range(9)))
    run(scheduler)
    waiting = scheduler.add(request("b", range(9)))
    sequence: Sequence
    for sequence in (running, waiting, running):
        scheduler.finish(sequence, "abort")
        scheduler.check_integrity()
    assert scheduler.pool.num_available_pages == 32 and not scheduler.has_work
    assert running.finish_reason == "abort"
