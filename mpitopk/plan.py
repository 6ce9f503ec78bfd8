"""Which parts of the buffer are selected from, and how many entries each of them sends."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpitopk.layout import Layout, Segment
    from mpitopk.typing import Array


NOWHERE = 2**32 - 1
"""No index; buffers have at most so many entries."""


def entries(density: float, size: int) -> int:
    """Return how many of `size` entries a density asks for: at least one, half rounded up."""
    return min(size, max(1, int(density * size + 0.5)))


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step sends: `counts[g]` entries of each group, and the dense pieces whole.

    Attributes
    ----------
    pieces : int64 array, shape (m, 3)
        Rows (start, stop, group), ascending, covering the buffer without gap or overlap.
        A group of -1 is dense: all its values are sent, without indices. The pieces of a group
        need not be neighbours. Groups never interleave with each other, only with dense pieces.
    counts : int64 array, shape (g,)
        Entries to select from each group, `0 < counts[g] < size of the group`.
    """

    pieces: Array
    counts: Array

    @cached_property
    def total(self) -> int:
        """Entries sent with an index."""
        return int(self.counts.sum())

    @cached_property
    def extents(self) -> Array:
        """Rows (start, stop): where each group begins and ends. Dense pieces may lie in between."""
        starts, stops, groups = self.pieces[self.pieces[:, 2] >= 0].T
        number = np.arange(self.counts.size)
        first, last = np.searchsorted(groups, number), np.searchsorted(groups, number, side="right") - 1
        return np.column_stack([starts[first], stops[last]])

    @cached_property
    def sparse(self) -> Array:
        """Rows (start, stop) of the pieces of groups."""
        return np.ascontiguousarray(self.pieces[self.pieces[:, 2] >= 0, :2])

    @cached_property
    def sparse_total(self) -> int:
        """Entries to select from."""
        return int((self.sparse[:, 1] - self.sparse[:, 0]).sum())

    @cached_property
    def dense(self) -> Array:
        """Rows (start, stop) of the dense pieces."""
        return np.ascontiguousarray(self.pieces[self.pieces[:, 2] < 0, :2])

    @cached_property
    def dense_total(self) -> int:
        """Entries sent without an index."""
        return int((self.dense[:, 1] - self.dense[:, 0]).sum())


def chunks(chunk: int, size: int) -> int:
    """Return how many chunks `size` entries are, the last of which may be shorter."""
    return -(-size // chunk)


def make_plan(layout: Layout, density: float, *, per_segment: bool, dense_below: int) -> Plan:
    """Return the plan that sends `density` of the buffer, or of each segment.

    Segments shorter than `dense_below` are sent dense; so is a group that would send everything.
    """
    return _planned(layout, partial(entries, density), per_segment, dense_below)


def make_chunk_plan(layout: Layout, chunk: int, *, per_segment: bool, dense_below: int) -> Plan:
    """Return the plan that sends an entry of each `chunk` of the buffer, or of each segment."""
    return _planned(layout, partial(chunks, chunk), per_segment, dense_below)


def _planned(layout: Layout, wanted: Callable[[int], int], per_segment: bool, dense_below: int) -> Plan:
    sparse = [s for s in layout.segments if s.size >= max(1, dense_below)]
    parts = [[s] for s in sparse] if per_segment else [sparse]
    return plan_groups(layout, [(part, wanted(sum(s.size for s in part))) for part in parts])


def plan_groups(layout: Layout, groups: Iterable[tuple[Sequence[Segment], int]]) -> Plan:
    """Return the plan that sends so many entries of each group of segments.

    A group that would send everything is sent dense; so are the segments of no group.
    """
    group = dict.fromkeys((s.name for s in layout.segments), -1)
    counts: list[int] = []
    for part, count in groups:
        if count < sum(s.size for s in part):
            group.update(dict.fromkeys((s.name for s in part), len(counts)))
            counts.append(count)
    rows: list[list[int]] = []
    for s in layout.segments:
        if s.size == 0:
            continue
        if rows and rows[-1][2] == group[s.name]:
            rows[-1][1] = s.stop
        else:
            rows.append([s.start, s.stop, group[s.name]])
    return Plan(np.array(rows, np.int64).reshape(-1, 3), np.array(counts, np.int64))
