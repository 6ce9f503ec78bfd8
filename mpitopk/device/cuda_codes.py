"""Codes on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.device.bin_kernels import BinKernels
from mpitopk.device.gpu_memory import GpuMemoryDevice
from mpitopk.device.launch import GRADIENTS, Array, launch, value
from mpitopk.device.line_kernels import LineKernels
from mpitopk.wire import HEADER

if TYPE_CHECKING:
    from mpitopk.bins import Bins
    from mpitopk.lines import Lines
    from mpitopk.wire import Messages

RATIO_BINS = 194


class CudaCodes(GpuMemoryDevice):
    """Bins, levels and lines on the current GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._bins: BinKernels | None = None
        self._lines: LineKernels | None = None

    def _bin_kernels_for(self, bins: Bins) -> BinKernels:
        if self._bins is None or self._bins.bins is not bins:
            self._bins = BinKernels(bins)
        return self._bins

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
        return self._bin_kernels_for(bins).select(gradient, residual, out, factor, marks, counts, scales)

    def pack_bins(
        self, x: Array, bins: Bins, marks: Array, counts: Array, scales: Array, words: Array
    ) -> None:
        self._bin_kernels_for(bins).pack(x, marks, counts, scales, words)

    def merge_bins(self, messages: Messages, bins: Bins, divisor: int, out: Array) -> int:
        codes = [start + HEADER.size for start in messages.starts]
        counts = [start + bins.offsets[0] for start in codes]
        starts = [self._on_gpu("codes", codes), self._on_gpu("bin counts", counts)]
        words = self._on_gpu("counts", messages.counts)
        return self._bin_kernels_for(bins).merge(messages, starts, words, divisor, out)

    def _line_kernels_for(self, lines: Lines) -> LineKernels:
        if self._lines is None or self._lines.lines is not lines:
            self._lines = LineKernels(lines)
        return self._lines

    def encode_lines(self, gradient: Array, residual: Array, out: Array, lines: Lines, words: Array) -> bool:
        return self._line_kernels_for(lines).encode(gradient, residual, out, words)

    def merge_lines(self, messages: Messages, lines: Lines, divisor: int, out: Array) -> None:
        starts = self._on_gpu("codes", [start + HEADER.size for start in messages.starts])
        kernels = self._line_kernels_for(lines)
        kernels.merge(messages.buffer, starts, len(messages.starts), divisor, out)

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
        flag, _ = self._cleared()
        kernel, bits = f"quantize<{GRADIENTS[str(gradient.dtype)]}>", levels.size.bit_length()
        what = gradient, np.int64(gradient.size), np.int32(bucket), np.int32(largest), levels, np.int32(bits)
        halves = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
        launch(kernel, self._blocks(32 * scales.size), *what, *halves, codes, scales, flag)
        return value(flag) == 0

    def merge_codes(
        self, messages: Messages, levels: Array | None, bits: int, bucket: int, divisor: int, out: Array
    ) -> None:
        where = messages.buffer, self._on_gpu("coded", messages.starts), np.int32(len(messages.starts))
        how = levels, np.int32(bits), np.int32(bucket), np.float32(divisor)
        launch("merge_codes", self._blocks(out.size), *where, *how, out, np.int64(out.size))

    def count_ratios(self, gradient: Array, bucket: int, largest: bool) -> Array:
        n, buckets = np.int64(gradient.size), -(-gradient.size // bucket)
        counts = self.zeros(RATIO_BINS, "uint32")
        kernel = f"count_ratios<{GRADIENTS[str(gradient.dtype)]}>"
        launch(kernel, self._blocks(32 * buckets), gradient, n, np.int32(bucket), np.int32(largest), counts)
        return cupy.asnumpy(counts).astype(np.int64)
