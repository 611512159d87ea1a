"""Finds stop texts in a stream of text and holds back what may become one."""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    text: str
    """What may be shown now."""
    stop: str | None = None
    """The stop text that was completed; nothing may follow."""


class StopChecker:
    """Matches several stop texts at once, each by Knuth, Morris and Pratt's automaton.

    The first stop text to be completed ends the stream (the longest of several that end
    together); it and what follows it are never shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: texts that are not empty."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """Characters of each stop text that the end of the stream matches."""
        self._held = ""
        """The end of the stream that is not shown yet."""

    def push(self, text: str) -> StopResult:
        """Take the next characters of the stream."""
        if not self._stops:
            return StopResult(text)
        pending = self._held + text
        for place, character in enumerate(text, start=len(self._held)):
            for i, stop in enumerate(self._stops):
                matched = self._matched[i]
                while matched and stop[matched] != character:
                    matched = self._fallbacks[i][matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    self._held = ""
                    return StopResult(pending[: place + 1 - len(stop)], stop)
                self._matched[i] = matched
        shown = len(pending) - max(self._matched)
        self._held = pending[shown:]
        return StopResult(pending[:shown])

    def finish(self) -> str:
        """The text held back, now that the stream has ended without a stop text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that also ends it."""
    result = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[matched] != stop[place]:
            matched = result[matched - 1]
        matched += stop[matched] == stop[place]
        result[place] = matched
    return result
