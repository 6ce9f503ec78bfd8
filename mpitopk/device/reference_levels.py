"""Entries rounded to levels, and the codes of that, in plain NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.device import elias
from mpitopk.device.arrays import HostMemoryDevice, keys, sound, widen
from mpitopk.device.hashing import uniform

if TYPE_CHECKING:
    from mpitopk.typing import Array
    from mpitopk.wire import Messages


def _by_lanes(x: Array, bucket: int) -> Array:
    """Return the sum of each bucket, added up as `Device.quantize` says."""
    sums = np.add.reduce(np.append(x, np.zeros(-x.size % bucket)).reshape(-1, bucket // 32, 32), axis=1)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    added: Array = sums[:, 0]
    return added


def _ratios(magnitudes: Array, bucket: int, largest: bool) -> tuple[Array, Array]:
    """Return the scale of each bucket and the ratio of each entry."""
    starts = np.arange(0, magnitudes.size, bucket)
    scales = np.maximum.reduceat(magnitudes, starts) if starts.size else magnitudes
    if not largest:
        norms = np.sqrt(_by_lanes(magnitudes.astype(np.float64) ** 2, bucket))
        most = float(np.finfo(magnitudes.dtype).max)
        scales = np.maximum(scales, np.minimum(norms, most).astype(magnitudes.dtype))
    divisors = np.repeat(np.where(scales > 0, scales, 1), bucket)[: magnitudes.size]
    return scales, (magnitudes / divisors).astype(np.float32)


class ReferenceLevels(HostMemoryDevice):
    """Levels in host memory, in NumPy."""

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
        x = widen(gradient, str(scales.dtype))
        if not sound(x):
            return False
        with np.errstate(over="ignore", under="ignore"):
            scales[:], ratios = _ratios(np.abs(x), bucket, largest)
        padding = np.zeros(-x.size % 32, np.float32)
        ratios = np.append(ratios, padding)
        u, q = uniform(key, ratios.size), np.zeros(ratios.size, np.uint32)
        for below, level in pairwise(levels):
            q += (ratios >= level) | (ratios > below + u * (level - below))
        code = 2 * q + np.signbit(np.append(x, padding))
        groups = code.reshape(-1, 1, 32) >> np.arange(levels.size.bit_length(), dtype=np.uint32)[:, None]
        bits = (groups & np.uint32(1)) << np.arange(32, dtype=np.uint32)
        codes[:] = np.bitwise_or.reduce(bits, axis=2).reshape(-1)
        return True

    def merge_codes(
        self, messages: Messages, levels: Array | None, bits: int, bucket: int, divisor: int, out: Array
    ) -> None:
        out.fill(0)
        buckets, places = -(-out.size // bucket), np.arange(32, dtype=np.uint32)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for words in messages.lists():
                scales, rest = np.split(words, [buckets * out.itemsize // 4])
                own, rest = np.split(rest, [0 if levels is not None else 1 << bits - 1])
                table = own.view(np.float32) if levels is None else levels
                planes = rest[: bits * -(-out.size // 32)].reshape(-1, bits, 1) >> places & np.uint32(1)
                code = np.add.reduce(planes << places[:bits, None], axis=1, dtype=np.uint32).reshape(-1)
                code = code[: out.size]
                sizes = (
                    table.astype(out.dtype)[code >> 1] * np.repeat(scales.view(out.dtype), bucket)[: out.size]
                )
                out += np.where(code & 1, -sizes, sizes)
            out /= divisor

    def to_elias(self, codes: Array, bits: int, size: int, bucket: int, out: Array) -> int:
        return elias.encode(codes, bits, size, bucket, out)

    def from_elias(self, words: Array, bits: int, size: int, bucket: int, codes: Array) -> bool:
        return elias.decode(words, bits, size, bucket, codes)

    def count_ratios(self, gradient: Array, bucket: int, largest: bool) -> Array:
        x = widen(gradient, "float64" if gradient.dtype == np.float64 else "float32")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scales, ratios = _ratios(np.abs(x), bucket, largest)
        counted = np.repeat(scales != 0, bucket)[: x.size]
        bins = np.clip((keys(ratios[counted]) >> np.uint32(20)).astype(np.int64) - 824, 0, 193)
        return np.bincount(bins, minlength=194)
