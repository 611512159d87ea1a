"""Activations in terms of int8, as the kernels that multiply them read them."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm.script import tirx as T

from .activation import GROUP, OFFSET, SCALE, START, STEP_SUM, Starts
from .vectors import ramp


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """The buffers of `activation.activation_buffers`."""

    groups: Any
    halves: Any
    kept: Any = None
    """Flags of the groups with a low term; None: there is one term alone."""
    starts: Starts | None = None
    """What `groups` has as starts; None: nothing."""

    @property
    def num_groups(self) -> int:
        """Groups of 32."""
        return int(self.groups.shape[0]) // (1 if self.kept is None else 2)

    @property
    def num_pairs(self) -> int:
        """Of words, that products are made of."""
        return self.starts.num_pairs if self.starts is not None else 0

    def words(
        self, group_size: int, token: Any, group: Any, term: int, first: int, count: int = 1
    ) -> Any:
        """`count` words of a group from the `first` on."""
        start: Any = first
        if group_size < GROUP:
            start = group % 2 * (group_size // 4) + first
        return self.groups[self._record(group_size, group, term), token, ramp(start, count)]

    def scale(self, group_size: int, token: Any, group: Any, term: int) -> Any:
        word = self.groups[self._record(group_size, group, term), token, SCALE]
        return T.reinterpret("float32", word)

    def sum(self, group_size: int, token: Any, group: Any, term: int) -> Any:
        """Σ of a term times its scale."""
        return T.reinterpret("float32", self._sum(group_size, token, group, term, OFFSET))

    def step_sum(self, group_size: int, token: Any, group: Any, term: int) -> Any:
        """Σ of a term."""
        return self._sum(group_size, token, group, term, STEP_SUM)

    def minus_zero(
        self, zero_point: int | Fraction, group_size: int, token: Any, group: Any, term: int
    ) -> Any:
        """-zero_point · Σ of a term. ValueError for one that is no integer, but that of the starts:
        it is rounded there."""
        if not zero_point:
            return T.int32(0)
        is_known = self.starts is not None and self.starts.zero_point == zero_point
        if is_known and group_size == GROUP:
            return self.groups[self._record(GROUP, group, term), token, OFFSET]
        if zero_point != int(zero_point):
            raise ValueError(f"these activations have no starts for a zero point of {zero_point}")
        return self.step_sum(group_size, token, group, term) * T.int32(-int(zero_point))

    def paired_start(self, token: Any, group: Any, term: int) -> Any:
        """What the sums of a group of 32 begin with, where words are multiplied in pairs."""
        return self.groups[self._record(GROUP, group, term), token, START]

    def _record(self, group_size: int, group: Any, term: int) -> Any:
        return (group if group_size == GROUP else group // 2) + term * self.num_groups

    def _sum(self, group_size: int, token: Any, group: Any, term: int, kind: int) -> Any:
        if group_size == GROUP:
            return self.groups[self._record(group_size, group, term), token, kind]
        return self.halves[group + term * 2 * self.num_groups, token, kind - STEP_SUM]
