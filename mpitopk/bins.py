"""Bins of consecutive entries, and the code in which the entries chosen of them travel.

The code, in words of 32 bits, little-endian: a scale for each segment; for each bin how many entries of it
follow, padded to a word; the entries of one bin after the other, each with its place in the bin and, in the
highest bit, whether it is negative; padded to a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.wire import damaged

if TYPE_CHECKING:
    from mpitopk.errors import ExchangeError
    from mpitopk.layout import Layout
    from mpitopk.typing import Array

LARGEST = 2**15
"""Entries of the largest bin: places take 15 bits."""


@dataclass(frozen=True, eq=False)
class Bins:
    """A layout cut into bins, none of them across two segments.

    Attributes
    ----------
    size : int
        Entries of a bin, up to `LARGEST`; the last one of a segment may have fewer.
    rows : int64 array, shape (m, 3)
        Rows (start, stop, first bin), one for each segment that has entries.
    scale_type : str
        Type of a scale.
    """

    size: int
    rows: Array
    scale_type: str

    @classmethod
    def of(cls, layout: Layout, size: int) -> Bins:
        """Return the bins of a layout."""
        spans = [(s.start, s.stop) for s in layout if s.size]
        ends = np.cumsum([0, *(-(-(stop - start) // size) for start, stop in spans)])
        rows = [(*span, end) for span, end in zip(spans, ends.tolist(), strict=False)]
        return cls(size, np.array(rows, np.int64).reshape(-1, 3), layout.accumulator)

    @cached_property
    def edges(self) -> Array:
        """Where each bin begins, and where the last one ends."""
        begins = [np.arange(start, stop, self.size) for start, stop, _ in self.rows.tolist()]
        return np.concatenate([*begins, self.rows[-1:, 1]])

    @cached_property
    def total(self) -> int:
        """How many bins there are."""
        start, stop, first = self.rows[-1].tolist() if len(self.rows) else (0, 0, 0)
        return int(first + -(-(stop - start) // self.size))

    @property
    def mark_words(self) -> int:
        """Words that have a bit for each entry of a bin."""
        return -(-self.size // 32)

    @property
    def count_type(self) -> str:
        """Type in which it travels how many entries of a bin there are."""
        return "uint8" if self.size < 2**8 else "uint16"

    @property
    def entry_type(self) -> str:
        """Type in which an entry travels."""
        return "uint8" if self.size <= 2**7 else "uint16"

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Where counts and entries begin in the code, in bytes."""
        counts = len(self.rows) * np.dtype(self.scale_type).itemsize
        return counts, counts + (self.total * np.dtype(self.count_type).itemsize + 3) // 4 * 4

    def words(self, entries: int) -> int:
        """Return the words of the code of so many entries."""
        return (self.offsets[1] + entries * np.dtype(self.entry_type).itemsize + 3) // 4

    def parts(self, words: Array, entries: int) -> tuple[Array, Array, Array]:
        """Return views of the scales, the counts and so many entries in words of code."""
        code, (counts, at) = words.view("uint8"), self.offsets
        n = self.total * np.dtype(self.count_type).itemsize
        last = at + entries * np.dtype(self.entry_type).itemsize
        return (
            code[:counts].view(self.scale_type),
            code[counts : counts + n].view(self.count_type),
            code[at:last].view(self.entry_type),
        )

    def intact(self, held: int) -> int:
        """Return the result of a compiled merge, or raise what its negative values stand for."""
        if held < 0:
            raise wrong(-1 - held)
        return held


def wrong(rank: int) -> ExchangeError:
    """Return the error for a message that is not such code."""
    return damaged(rank, "bins whose entries are too many, out of order or range, or do not fill it")
