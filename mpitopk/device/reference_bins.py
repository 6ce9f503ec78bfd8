"""The operations on bins in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.bins import wrong
from mpitopk.device.arrays import HostMemoryDevice, sound, widen
from mpitopk.wire import Message

if TYPE_CHECKING:
    from mpitopk.bins import Bins
    from mpitopk.typing import Array
    from mpitopk.wire import Messages


def mean(x: Array) -> float:
    """Return the mean from 256 sums of every 256th, which are added up by halves."""
    sums = np.add.reduce(np.append(x, np.zeros(-x.size % 256)).reshape(-1, 256), axis=0)
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0] / x.size)


def decoded(messages: Messages, bins: Bins) -> Iterator[tuple[Array, Array]]:
    """Yield the indices of the entries of each message, and their values."""
    for rank, (at, n_words) in enumerate(zip(messages.starts, messages.counts, strict=True)):
        if n_words < bins.words(0):
            raise wrong(rank)
        words = Message.parse(messages.buffer[at:], n_words, 0, None).indices
        counts = bins.parts(words, 0)[1].astype(np.int64)
        entries = int(counts.sum())
        if (counts > np.diff(bins.edges)).any() or bins.words(entries) != n_words:
            raise wrong(rank)
        scales, _, code = bins.parts(words, entries)
        bits = 8 * code.itemsize - 1
        inside = np.repeat(np.arange(bins.total), counts)
        indices = bins.edges[inside] + (code & ((1 << bits) - 1))
        if (indices >= bins.edges[inside + 1]).any() or (np.diff(indices) <= 0).any():
            raise wrong(rank)
        scale = scales[np.searchsorted(bins.rows[:, 2], inside, side="right") - 1]
        yield indices, np.where(code >> bits, -scale, scale)


class ReferenceBins(HostMemoryDevice):
    """Bins in host memory, in NumPy."""

    def select_bins(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        bins: Bins,
        factor: float,
        marks: Array,
        counts: Array,
        scales: Array,
    ) -> int | None:
        g, every = widen(gradient, str(out.dtype)), marks.reshape(bins.total, bins.mark_words).view(np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(residual, g, out=out)
            ahead = residual + out.dtype.type(factor) * g
            if not sound(out):
                return None
            for segment, (start, stop, first) in enumerate(bins.rows.tolist()):
                rows = -(-(stop - start) // bins.size)
                here = slice(first, first + rows)
                size, looked = (
                    np.abs(np.append(x[start:stop], np.zeros(rows * bins.size - stop + start, x.dtype)))
                    for x in (out, ahead)
                )
                most = size.reshape(rows, -1).max(axis=1)
                chosen = (looked.reshape(rows, -1) >= most[:, None]) & (size.reshape(rows, -1) > 0)
                counts[here] = chosen.sum(axis=1)
                bits = np.packbits(chosen, axis=1, bitorder="little")
                every[here] = 0
                every[here, : bits.shape[1]] = bits
                scales[segment] = mean(most)
        return int(counts.sum(dtype=np.int64))

    def pack_bins(
        self, x: Array, bins: Bins, marks: Array, counts: Array, scales: Array, words: Array
    ) -> None:
        rows = marks.reshape(bins.total, bins.mark_words).view(np.uint8)
        bits = np.unpackbits(rows, axis=1, bitorder="little")
        inside, places = np.nonzero(bits)
        words[:] = 0
        to_scales, to_counts, code = bins.parts(words, inside.size)
        to_scales[:], to_counts[:] = scales, counts
        at = bins.edges[inside] + places
        code[:] = places | (x[at] < 0).astype(np.int64) << 8 * code.itemsize - 1
        scale = scales[np.searchsorted(bins.rows[:, 2], inside, side="right") - 1]
        x[at] -= np.where(x[at] < 0, -scale, scale)

    def merge_bins(self, messages: Messages, bins: Bins, divisor: int, out: Array) -> int:
        parts = list(decoded(messages, bins))
        held = np.zeros(out.size, np.bool_)
        out.fill(0)
        with np.errstate(over="ignore", invalid="ignore"):
            for indices, values in parts:
                out[indices] += values
                held[indices] = True
            out[held] /= divisor
        return int(held.sum())
