"""Fewer threads while other programs want the CPUs, all of them again when they do not.

The threads of a decoding step meet after every operator, some 10 µs apart. If one of them has lost
its CPU to another program the others wait for it, for whole time slices, and then many threads are
slower than one. How often the system took a CPU from this process tells that others want it;
whether fewer threads are faster is not guessed but tried, for a few steps.
"""

import time
from collections.abc import Callable

try:
    import resource
except ImportError:  # Windows: nothing is counted there, so all threads always
    resource = None  # type: ignore[assignment]

MOST_GOVERNED_TOKENS = 64
"""Longer steps compute long enough between two meetings that more threads are never slower."""
_WINDOW = 8
"""Steps with the same number of tokens by which a number of threads is judged."""
_BETTER = 0.9
"""Another number of threads is kept if it takes at most this part of the time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 2.0
"""Seconds from a trial that changed nothing to the next: each is twice as long as the last."""


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
        self._settled_seconds: float | None = None
        """During a trial: what the window before it took."""
        self._size = 0
        self._was_up = False
        self._pause, self._next_trial = _FIRST_PAUSE, 0.0
        self._steps, self._seconds, self._preemptions_before = 0, 0.0, 0
        self._start_window()

    def run(self, num_tokens: int, step: Callable[[], None]) -> None:
        """Do a step of `num_tokens` with the threads that are best for it."""
        if self._most == 1 or num_tokens > MOST_GOVERNED_TOKENS:
            self._use(self._most)
            step()
            return
        if num_tokens != self._size:
            self._size, self._settled_seconds = num_tokens, None
            self._start_window()
        if self._settled_seconds is None:
            self._use(self._settled)
        start = self._clock()
        step()
        now = self._clock()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - start
        if self._settled_seconds is not None:
            self._judge(self._settled_seconds, now)
        elif self._steps == _WINDOW:
            self._consider(now)

    def _consider(self, now: float) -> None:
        """After a window: begin a trial if there is a reason and the last is long enough ago, or
        nobody has wanted the CPUs since."""
        preemptions = self._preemptions() - self._preemptions_before
        if now >= self._next_trial or not preemptions:
            candidate = self._candidate(contended=preemptions >= _WINDOW)
            if candidate is not None:
                self._settled_seconds = self._seconds
                self._use(candidate)
        self._start_window()

    def _candidate(self, *, contended: bool) -> int | None:
        """Half the threads or twice as many; by turns, where both are worth a trial."""
        up = min(2 * self._settled, self._most) if self._settled < self._most else None
        down = self._settled // 2 if contended and self._settled > 1 else None
        if up is None or down is None:
            return up or down
        self._was_up = not self._was_up
        return up if self._was_up else down

    def _judge(self, settled_seconds: float, now: float) -> None:
        """During a trial: end it after a window, or once it cannot be won any more."""
        is_lost = self._seconds > _BETTER * settled_seconds
        if not is_lost and self._steps < _WINDOW:
            return
        if is_lost:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._settled, self._pause = self._running, _FIRST_PAUSE
        # A trial that was won has another at once: what has changed may have changed more.
        self._next_trial = now + self._pause if is_lost else now
        self._settled_seconds = None
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
