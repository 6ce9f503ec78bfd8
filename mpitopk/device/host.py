"""The host with the compiled kernels (native/*.cpp)."""

from __future__ import annotations

from math import hypot
from typing import TYPE_CHECKING

import numpy as np

import mpitopk.device._native as _native
from mpitopk.device.arrays import HostMemoryDevice
from mpitopk.wire import misplaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpitopk.bins import Bins
    from mpitopk.lines import Lines
    from mpitopk.plan import Plan
    from mpitopk.typing import Array
    from mpitopk.wire import Message, Messages

ALIGNMENT = 64


class HostDevice(HostMemoryDevice):
    """The host, in C++.

    Parameters
    ----------
    threads : int
        How many threads work on one operation.
    isa : {"scalar", "avx2"}, optional
        Instructions to use; by default the best that this processor has.
    """

    name = "host"

    def __init__(self, threads: int = 1, isa: str | None = None) -> None:
        self.engine = _native.Engine(threads, isa or _native.isas()[-1])
        self._merged = np.empty(0, np.uint32), np.empty(0, np.float32)

    @property
    def fallbacks(self) -> int:
        return self.engine.fallbacks

    def empty(self, size: int, dtype: str) -> Array:
        nbytes = size * np.dtype(dtype).itemsize
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes].view(dtype)

    def zeros(self, size: int, dtype: str) -> Array:
        x = self.empty(size, dtype)
        x.fill(0)
        return x

    def finite(self, x: Array) -> bool:
        return self.engine.finite(x)

    def zero_nonfinite(self, x: Array) -> int:
        return self.engine.zero_nonfinite(x)

    def norm(self, x: Array) -> float:
        return self.engine.norm(x)

    def accumulate(
        self, gradient: Array, residual: Array | None, out: Array, *, scale: float = 1, keep: float = 1
    ) -> bool:
        return self.engine.accumulate(gradient, residual, out, scale, keep)

    def accumulate_norm(self, gradient: Array, residual: Array, out: Array, plan: Plan) -> float | None:
        def parts(rows: Array) -> Iterator[tuple[Array, Array, Array]]:
            return ((gradient[a:b], residual[a:b], out[a:b]) for a, b in rows.tolist())

        norms = [self.engine.accumulate_norm(*part) for part in parts(plan.sparse)]
        sound = [self.engine.accumulate(*part, 1, 1) for part in parts(plan.dense)]
        return hypot(*norms) if all(sound) and min(norms, default=0) >= 0 else None

    def accumulate_select(
        self, gradient: Array, residual: Array, out: Array, plan: Plan, indices: Array, values: Array
    ) -> bool:
        return self.engine.accumulate_select(
            gradient, residual, out, plan.pieces, plan.counts, indices, values
        )

    def select(self, x: Array, plan: Plan, indices: Array, values: Array) -> bool:
        return self.engine.select(x, plan.pieces, plan.counts, indices, values)

    def move_above(
        self, x: Array, plan: Plan, threshold: float, least: int, indices: Array, values: Array
    ) -> int:
        return self.engine.move_above(x, plan.pieces, threshold, least, indices, values)

    def search_above(
        self,
        x: Array,
        plan: Plan,
        threshold: float,
        least: int,
        rounds: int,
        indices: Array,
        values: Array,
    ) -> int:
        return self.engine.search_above(x, plan.pieces, threshold, least, rounds, indices, values)

    def chunk_maxima(self, x: Array, plan: Plan, chunk: int, indices: Array) -> None:
        self.engine.chunk_maxima(x, plan.pieces, plan.counts, chunk, indices)

    def sample(self, x: Array, plan: Plan, key: int, out: Array) -> None:
        self.engine.sample(x, plan.pieces, key, out)

    def random_indices(self, plan: Plan, key: int, out: Array) -> None:
        self.engine.random_indices(plan.pieces, plan.counts, key, out)

    def take(self, x: Array, indices: Array, values: Array, *, clear: bool) -> None:
        self.engine.take(x, indices, values, clear)

    def pack(self, x: Array, plan: Plan, indices: Array, values: Array, message: Message) -> None:
        self.engine.pack(x, plan.dense, indices, values, message.indices, message.values)

    def merge(self, messages: Messages, dense: Array, divisor: int, out: Array) -> int:
        held = self.engine.merge(
            messages.buffer,
            messages.starts,
            messages.counts,
            messages.itemsize,
            dense,
            divisor,
            out,
        )
        return messages.intact(held, out.size)

    def merge_sparse(
        self, messages: Messages, dense: Array, divisor: int, size: int, dtype: str
    ) -> tuple[Array, Array]:
        room = min(size, sum(messages.counts) + int((dense[:, 1] - dense[:, 0]).sum()))
        if self._merged[0].size < room or self._merged[1].dtype != dtype:
            self._merged = self.empty(room, "uint32"), self.empty(room, dtype)
        indices, values = self._merged
        held = self.engine.merge_sparse(
            messages.buffer,
            messages.starts,
            messages.counts,
            messages.itemsize,
            dense,
            divisor,
            size,
            indices,
            values,
        )
        held = messages.intact(held, size)
        return indices[:held], values[:held]

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
        of_bins = bins.rows, bins.size
        entries = self.engine.select_bins(gradient, residual, out, *of_bins, factor, marks, counts, scales)
        return None if entries < 0 else entries

    def pack_bins(
        self, x: Array, bins: Bins, marks: Array, counts: Array, scales: Array, words: Array
    ) -> None:
        self.engine.pack_bins(x, bins.rows, bins.size, marks, counts, scales, words)

    def merge_bins(self, messages: Messages, bins: Bins, divisor: int, out: Array) -> int:
        every = messages.buffer, messages.starts, messages.counts
        held = self.engine.merge_bins(*every, bins.rows, bins.size, divisor, out)
        return bins.intact(held)

    def combine(
        self, mine: Message, theirs: Message, plan: Plan, out: Message, indices: Array, values: Array
    ) -> bool:
        result = self.engine.combine(
            mine.indices,
            mine.values,
            theirs.indices,
            theirs.values,
            plan.pieces,
            plan.counts,
            out.indices,
            out.values,
            indices,
            values,
        )
        if result < 0:
            raise misplaced()
        return result > 0

    def put_back(self, x: Array, indices: Array, values: Array, winners: Array, *, among: bool) -> None:
        self.engine.put_back(x, indices, values, winners, among)

    def quantize(
        self,
        gradient: Array,
        levels: Array,
        bucket: int,
        largest: bool,
        key: int,
        codes: Array,
        scales: Array,
    ) -> bool:
        return self.engine.quantize(gradient, levels, bucket, largest, key, codes, scales)

    def merge_codes(
        self, messages: Messages, levels: Array | None, bits: int, bucket: int, divisor: int, out: Array
    ) -> None:
        where = messages.buffer, messages.starts, messages.counts
        self.engine.merge_codes(*where, levels, bits, bucket, divisor, out)

    def to_elias(self, codes: Array, bits: int, size: int, bucket: int, out: Array) -> int:
        return self.engine.to_elias(codes, bits, size, bucket, out)

    def from_elias(self, words: Array, bits: int, size: int, bucket: int, codes: Array) -> bool:
        return self.engine.from_elias(words, bits, size, bucket, codes)

    def count_ratios(self, gradient: Array, bucket: int, largest: bool) -> Array:
        return self.engine.count_ratios(gradient, bucket, largest)

    def encode_lines(self, gradient: Array, residual: Array, out: Array, lines: Lines, words: Array) -> bool:
        book = lines.book.vectors, lines.book.representatives, lines.hinge_bits
        return self.engine.encode_lines(gradient, residual, out, *book, words)

    def merge_lines(self, messages: Messages, lines: Lines, divisor: int, out: Array) -> None:
        every = messages.buffer, messages.starts, messages.counts
        book = lines.book.vectors, lines.book.representatives, lines.hinge_bits
        self.engine.merge_lines(*every, *book, divisor, out)

    def divide(self, x: Array, divisor: int) -> bool:
        return self.engine.divide(x, divisor)
