"""Bins on a GPU: the kernels of bins.cu in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.bins import wrong
from mpitopk.device.launch import GRADIENTS, THREADS, Array, allocate, clear, launch

if TYPE_CHECKING:
    from mpitopk.bins import Bins
    from mpitopk.wire import Messages

WARPS = THREADS // 32


class BinKernels:
    """The bins of one layout, and room for what is found on the way."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self._tiles = -(-bins.total // THREADS)
        self._rows = cupy.asarray(np.append(bins.rows.reshape(-1), 0))  # CuPy has no empty arrays
        self._geometry = self._rows, np.int32(len(bins.rows)), np.int32(bins.size), np.int64(bins.total)
        self._count_bytes, self._entry_bytes = (
            np.int32(np.dtype(kind).itemsize) for kind in (bins.count_type, bins.entry_type)
        )
        self._most = allocate(max(1, bins.total), "float32")
        self._held = allocate(max(1, bins.total * bins.mark_words), "uint32")
        self._result = allocate(16, "uint8")
        self._start = cupy.asarray(np.zeros(1, np.int64))
        self._room(1)

    def _room(self, ranks: int) -> None:
        """Make room for the tallies of so many codes."""
        self._tallies = allocate(max(1, ranks * self._tiles), "uint32")
        self._totals = allocate(ranks, "uint64")

    def _settle(self, buffer: Array, starts: Array, ranks: int, totals: Array) -> None:
        """Find out where the entries of each tile of bins begin, whose counts begin at the given bytes."""
        counts = buffer, starts, np.int32(self._tiles), np.int64(self.bins.total), self._count_bytes
        launch("tally_bins", ranks * self._tiles, *counts, self._tallies)
        launch("settle_bins", ranks, self._tallies, np.int32(self._tiles), totals)

    def select(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        factor: float,
        marks: Array,
        counts: Array,
        scales: Array,
    ) -> int | None:
        """Return how many entries are chosen; None if not every sum is sound."""
        clear(self._result)
        kernel, blocks = f"select_bins<{GRADIENTS[str(gradient.dtype)]}>", -(-self.bins.total // WARPS)
        flag, counts = self._result[:4].view("uint32"), counts.view("uint8")
        launch(
            kernel, blocks, gradient, residual, out, *self._geometry, np.float32(factor), marks, counts,
            self._count_bytes, self._most, flag,
        )  # fmt: skip
        launch("bin_means", len(self.bins.rows), self._most, self._rows, np.int32(self.bins.size), scales)
        self._settle(counts, self._start, 1, self._result[8:].view("uint64"))
        bad, entries = self._found()
        return None if bad else entries

    def pack(self, x: Array, marks: Array, counts: Array, scales: Array, words: Array) -> None:
        """Write the code of what is chosen."""
        bins, code = self.bins, words.view("uint8")
        self._settle(counts.view("uint8"), self._start, 1, self._totals)
        before, at = bins.offsets
        words.fill(0)
        code[:before] = scales.view("uint8")
        code[before : before + counts.nbytes] = counts.view("uint8")
        launch(
            "pack_bins", self._tiles, x, *self._geometry, marks, counts.view("uint8"), self._count_bytes,
            self._tallies, scales, code[at:], self._entry_bytes,
        )  # fmt: skip

    def merge(self, messages: Messages, starts: list[Array], words: Array, divisor: int, out: Array) -> int:
        """Return how many entries some message holds; `starts`: where codes and their counts begin."""
        bins, ranks = self.bins, len(messages.counts)
        for rank, n_words in enumerate(messages.counts):
            if n_words < bins.words(0):
                raise wrong(rank)
        clear(self._result)
        flag, total = self._result[:4].view("uint32"), self._result[8:].view("uint64")
        before, at = bins.offsets
        if self._totals.size < ranks:
            self._room(ranks)
        self._settle(messages.buffer, starts[1], ranks, self._totals)
        codes = (
            messages.buffer, starts[0], words, np.int32(ranks), np.int32(self._tiles), *self._geometry,
            self._count_bytes, self._entry_bytes, np.int32(before), np.int64(at), self._tallies,
        )  # fmt: skip
        launch("check_bins", ranks * self._tiles, *codes, self._totals, flag)
        launch("merge_bins", self._tiles, *codes, out, self._held, flag)
        blocks = -(-self._held.size // THREADS)
        launch("divide_held", blocks, *self._geometry, self._held, np.float32(divisor), out, flag, total)
        bad, held = self._found()
        return bins.intact(bad - 1 - ranks if bad else held)

    def _found(self) -> tuple[int, int]:
        """Return what the kernels report, once they are done: what is wrong, and a total."""
        result = cupy.asnumpy(self._result)
        return int(result[:4].view(np.uint32)[0]), int(result[8:].view(np.uint64)[0])
