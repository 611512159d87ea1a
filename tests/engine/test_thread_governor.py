"""The governor over a machine that is made up: its clock goes on by what a step takes there."""

import pytest
from everycast.engine.thread_governor import MOST_GOVERNED_TOKENS, ThreadGovernor
from hypothesis import given
from hypothesis import strategies as st

STEP = 0.002
"""Seconds of a step of one token with one thread, on idle CPUs."""


class Machine:
    """`cpus` CPUs, all of them wanted by other programs while `is_busy`."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.is_busy = cpus, False
        self.now, self.preemptions, self.threads = 0.0, 0, cpus
        self.governor = ThreadGovernor(cpus, self.set_threads, self.clock, lambda: self.preemptions)

    def set_threads(self, count: int) -> None:
        assert 1 <= count <= self.cpus
        self.threads = count

    def clock(self) -> float:
        return self.now

    def seconds(self, threads: int, num_tokens: int) -> float:
        alone = STEP * num_tokens / threads
        # Threads that meet at every operator wait for one another's time slices.
        return alone * (1.5 if threads == 1 else 2 * threads**2) if self.is_busy else alone

    def run(self, num_tokens: int = 1) -> int:
        """A step; the number of threads it had."""
        used = []

        def step() -> None:
            used.append(self.threads)
            self.now += self.seconds(self.threads, num_tokens)
            self.preemptions += self.threads if self.is_busy else 0

        self.governor.run(num_tokens, step)
        return used[0]

    def run_for(self, seconds: float) -> list[int]:
        end = self.now + seconds
        used = []
        while self.now < end:
            used.append(self.run())
        return used


@pytest.mark.parametrize("cpus", [1, 2, 3, 8])
def test_all_threads_on_idle_cpus(cpus: int) -> None:
    assert set(Machine(cpus).run_for(3)) == {cpus}


@pytest.mark.parametrize("cpus", [2, 3, 8, 64])
def test_busy_cpus_bring_the_threads_down_and_idle_ones_up_again(cpus: int) -> None:
    machine = Machine(cpus)
    machine.run_for(1)
    machine.is_busy = True
    machine.run_for(10)
    used = machine.run_for(5)
    assert used.count(1) > 0.9 * len(used)
    machine.is_busy = False
    machine.run_for(0.5)
    assert set(machine.run_for(1)) == {cpus}


@pytest.mark.parametrize(("cpus", "slow_steps"), [(2, 4), (4, 2), (8, 1)])
def test_as_soon_as_enough_cpus_were_lost_fewer_threads_are_tried(
    cpus: int, slow_steps: int
) -> None:
    machine = Machine(cpus)
    machine.run_for(1)
    machine.is_busy = True
    used = machine.run_for(2)
    assert set(used[:slow_steps]) == {cpus}
    assert set(used[slow_steps : slow_steps + 8]) == {cpus // 2}


def test_after_coming_down_all_threads_are_not_tried_at_once() -> None:
    machine = Machine(2)
    machine.is_busy = True
    used = machine.run_for(0.6)
    first = used.index(1)
    # A trial, and half a second in steps of one thread.
    assert set(used[first : first + int(0.5 / (1.5 * STEP))]) == {1}


@given(st.lists(st.integers(0, 7), max_size=60))
def test_single_lost_cpus_on_a_quiet_machine_are_no_reason(lost: list[int]) -> None:
    """lost: CPUs lost in each 8 steps, one after the other; the steps with them are slow."""
    machine = Machine(4)
    for count in lost:
        for i in range(8):
            if i < count:
                machine.preemptions += 1
                machine.now += 0.01
            assert machine.run() == 4


@pytest.mark.parametrize("cpus", [2, 4])
def test_a_quiet_machine_takes_some_cpus_from_slow_steps_too(cpus: int) -> None:
    """Steps of 50 ms lose more CPUs each than short ones do, though no more a second."""
    machine = Machine(cpus)
    for i in range(200):
        machine.preemptions += 1 + i % 3
        assert machine.run(num_tokens=25 * cpus) == cpus


def test_one_step_shows_that_fewer_threads_are_slower_where_steps_are_long() -> None:
    machine = Machine(2)
    machine.seconds = lambda threads, num_tokens: STEP * num_tokens / threads  # type: ignore[method-assign]
    used = []
    for _ in range(40):
        machine.preemptions += 20
        used.append(machine.run(num_tokens=50))
    assert used[:4] == [2, 2, 1, 2]
    assert used.count(1) == 3, "after pauses of half a second and one"


def test_cpus_lost_in_long_steps_do_not_count() -> None:
    machine = Machine(2)
    for _ in range(20):
        machine.preemptions += 1
        assert {machine.run() for _ in range(5)} == {2}
        machine.preemptions += 30
        assert machine.run(512) == 2


def test_long_steps_have_all_threads() -> None:
    machine = Machine(2)
    machine.is_busy = True
    machine.run_for(5)
    assert machine.run(MOST_GOVERNED_TOKENS + 1) == 2
    assert machine.run() == 1


def test_preemptions_alone_change_nothing() -> None:
    """Others take CPUs, but fewer threads would be slower: then they are only tried."""
    machine = Machine(4)
    machine.seconds = lambda threads, num_tokens: STEP * num_tokens / threads  # type: ignore[method-assign]
    machine.is_busy = True
    used = machine.run_for(20)
    assert used.count(4) > 0.97 * len(used)
    assert set(used) == {4, 2}


@given(
    st.sampled_from([2, 3, 4, 6]),
    st.lists(st.tuples(st.booleans(), st.integers(1, 80), st.integers(1, 30)), max_size=60),
)
def test_any_course_of_steps(cpus: int, course: list[tuple[bool, int, int]]) -> None:
    """Every step runs once, with a possible number of threads; long ones with all."""
    machine = Machine(cpus)
    steps: list[int] = []
    for is_busy, num_tokens, count in course:
        machine.is_busy = is_busy
        steps += [machine.run(num_tokens) for _ in range(count)]
        if num_tokens > MOST_GOVERNED_TOKENS:
            assert steps[-1] == cpus
    assert all(1 <= threads <= cpus for threads in steps)
    assert len(steps) == sum(count for _, _, count in course)


def test_a_failing_step_is_the_callers() -> None:
    machine = Machine(2)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        machine.governor.run(1, fail)
    machine.run_for(1)
