"""Fewer threads while other programs want the CPUs, all of them again when they do not.

The threads of a decoding step meet after every operator, some 10 µs apart. If one of them has lost
its CPU to another program the others wait for it, for whole time slices, and then many threads are
slower than one. How often the system took a CPU from this process tells that others want it;
whether fewer threads are faster is not guessed but tried, for a few steps.
"""

import time
from collections.abc import Callable
from typing import Literal

try:
    import resource
except ImportError:  # Windows: nothing is counted there, so all threads always
    resource = None  # type: ignore[assignment]

MOST_GOVERNED_TOKENS = 64
"""Longer steps compute long enough between two meetings that more threads are never slower."""
_WINDOW = 8
"""Steps with the same number of tokens by which a number of threads is judged, and how many CPUs
lost within them tell that others want these."""
_LOST_A_SECOND = 120
"""If they are lost as often as this. The system takes some 35 a second from two threads on an idle
machine, 90 for a tenth of one; one other program that never sleeps takes 250 and more."""
_LONG_STEP = 0.02
"""Seconds, many time slices: a trial of such steps can be lost by one, of shorter ones by half a
window."""
_BETTER = 0.9
"""Another number of threads is kept if it takes at most this part of the time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0
"""Seconds from a trial that changed nothing to the next that is like it: each is twice as long as
the last."""

_Direction = Literal["down", "up"]
"""Half the threads, or twice as many."""


class ThreadGovernor:
    """Settles the number of threads from step to step. Use it from the thread that runs them."""

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], object],
        clock: Callable[[], float] = time.perf_counter,
        preemptions: Callable[[], int] | None = None,
    ) -> None:
        """most: threads where nothing else runs. set_threads: lets later steps use so many.
        clock: seconds. preemptions: how often this process has lost a CPU it was using."""
        self._most, self._set_threads = most, set_threads
        self._clock, self._preemptions = clock, preemptions or _preemptions
        self._running = self._settled = most
        """Threads of the last step, and of small steps that are no trial."""
        self._trial: _Direction | None = None
        self._settled_seconds = 0.0
        """During a trial: what a step took before it."""
        self._size = 0
        self._next_trial: dict[_Direction, float] = {"down": 0.0, "up": 0.0}
        self._pause: dict[_Direction, float] = {"down": _FIRST_PAUSE, "up": _FIRST_PAUSE}
        self._steps, self._seconds, self._preemptions_before = 0, 0.0, 0
        self._start_window()

    def run(self, num_tokens: int, step: Callable[[], None]) -> None:
        """Do a step of `num_tokens` with the threads that are best for it."""
        if self._most == 1 or num_tokens > MOST_GOVERNED_TOKENS:
            self._use(self._most)
            step()
            self._size = 0  # CPUs that were lost in it tell nothing of the steps before and after
            return
        if num_tokens != self._size:
            self._size, self._trial = num_tokens, None
            self._start_window()
        if self._trial is None:
            self._use(self._settled)
        start = self._clock()
        step()
        now = self._clock()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - start
        if self._trial is not None:
            self._judge(self._trial, now)
        else:
            self._consider(now)

    def _consider(self, now: float) -> None:
        """After a window, or as soon as enough CPUs were lost in it: begin a trial if there is a
        reason and the last one like it is long enough ago."""
        preemptions = self._preemptions() - self._preemptions_before
        if not preemptions and self._settled == self._most:
            self._start_window()  # quick steps before the slow ones would hide how slow these are
            return
        is_contended = preemptions >= max(_WINDOW, _LOST_A_SECOND * self._seconds)
        if self._steps < _WINDOW and not is_contended:
            return
        if is_contended and self._settled > 1 and now >= self._next_trial["down"]:
            self._begin("down", self._settled // 2)
        elif self._settled < self._most and (now >= self._next_trial["up"] or not preemptions):
            self._begin("up", min(2 * self._settled, self._most))
        self._start_window()

    def _begin(self, trial: _Direction, threads: int) -> None:
        self._trial, self._settled_seconds = trial, self._seconds / self._steps
        self._use(threads)

    def _judge(self, trial: _Direction, now: float) -> None:
        """During a trial: end it after a window, or when what must be steps enough is too slow."""
        least = 1 if self._settled_seconds > _LONG_STEP else _WINDOW // 2
        allowed = _BETTER * self._settled_seconds * max(self._steps, least)
        is_lost = self._seconds > allowed
        if not is_lost and self._steps < _WINDOW:
            return
        if is_lost:
            self._next_trial[trial] = now + self._pause[trial]
            self._pause[trial] = min(2 * self._pause[trial], _LONGEST_PAUSE)
        else:
            # Another may follow at once: what has changed may have changed more. But up again only
            # after a while, unless nobody wants the CPUs any more.
            self._settled = self._running
            self._next_trial = {"down": now, "up": now}
            if trial == "down":
                self._next_trial["up"] += _FIRST_PAUSE
            self._pause = {"down": _FIRST_PAUSE, "up": _FIRST_PAUSE}
        self._trial = None
        self._start_window()

    def _use(self, threads: int) -> None:
        if threads != self._running:
            self._running = threads
            self._set_threads(threads)

    def _start_window(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._preemptions_before = self._preemptions()


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0
