"""Every operation in plain NumPy: the oracle of the other devices, and the host without a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpitopk.device.arrays import keys, sound, widen
from mpitopk.device.hashing import permuted, sampled
from mpitopk.device.reference_bins import ReferenceBins
from mpitopk.device.reference_levels import ReferenceLevels
from mpitopk.device.reference_lines import ReferenceLines
from mpitopk.plan import NOWHERE
from mpitopk.wire import corrupt, misplaced

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array
    from mpitopk.wire import Message, Messages


def topk(x: Array, k: int) -> Array:
    """Return the indices of the k winners, ascending."""
    key = keys(x)
    kth = np.partition(key, x.size - k)[x.size - k]
    above = np.flatnonzero(key > kth)
    ties = np.flatnonzero(key == kth)[: k - above.size]
    return np.sort(np.concatenate([above, ties]))


def positions(plan: Plan, group: int) -> Array:
    """Return the flat indices of a group, ascending."""
    rows = plan.pieces[plan.pieces[:, 2] == group]
    return np.concatenate([np.arange(start, stop) for start, stop, _ in rows])


def _sums(x: Array) -> Array:
    """Return the sum of each stretch of 4096: 256 sums of every 256th entry, added up by halves."""
    lanes = np.append(x, np.zeros(-x.size % 4096)).reshape(-1, 16, 256)
    sums = np.add.reduce(lanes, axis=1)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    added: Array = sums[:, 0]
    return added


def _rounded(number: float, dtype: Any) -> Array:
    with np.errstate(over="ignore"):
        return np.array([number]).astype(dtype)


class ReferenceDevice(ReferenceBins, ReferenceLevels, ReferenceLines):
    """The host, in NumPy.

    Operations call one another by the class: those of an instance may be wrapped in a timer.
    """

    name = "numpy"

    def empty(self, size: int, dtype: str) -> Array:
        return np.empty(size, dtype)

    def zeros(self, size: int, dtype: str) -> Array:
        return np.zeros(size, dtype)

    def finite(self, x: Array) -> bool:
        return bool(np.isfinite(widen(x, str(x.dtype))).all())

    def zero_nonfinite(self, x: Array) -> int:
        bad = ~np.isfinite(widen(x, str(x.dtype)))
        x[bad] = 0
        return int(bad.sum())

    def norm(self, x: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = widen(x, "float64").astype(np.float64) ** 2
            while sums.size > 1:
                sums = _sums(sums)
            return float(np.sqrt(sums[0])) if sums.size else 0.0

    def accumulate(
        self, gradient: Array, residual: Array | None, out: Array, *, scale: float = 1, keep: float = 1
    ) -> bool:
        number, wide = out.dtype.type, widen(gradient, str(out.dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = wide if scale == 1 else number(scale) * wide
            kept = residual if residual is None or keep == 1 else number(keep) * residual
            np.copyto(out, scaled) if kept is None else np.add(kept, scaled, out=out)
        return sound(out)

    def accumulate_select(
        self, gradient: Array, residual: Array, out: Array, plan: Plan, indices: Array, values: Array
    ) -> bool:
        finite = ReferenceDevice.accumulate(self, gradient, residual, out)
        ReferenceDevice.select(self, out, plan, indices, values)
        out[indices] = 0
        return finite

    def select(self, x: Array, plan: Plan, indices: Array, values: Array) -> bool:
        at = 0
        for group, count in enumerate(plan.counts.tolist()):
            where = positions(plan, group)
            indices[at : at + count] = where[topk(x[where], count)]
            at += count
        np.take(x, indices, out=values)
        return sound(x)

    def move_above(
        self, x: Array, plan: Plan, threshold: float, least: int, indices: Array, values: Array
    ) -> int:
        found = keys(x) >= keys(_rounded(threshold, x.dtype))
        for start, stop in plan.dense.tolist():
            found[start:stop] = False
        where = np.flatnonzero(found)
        if least <= where.size <= indices.size:
            indices[: where.size] = where
            values[: where.size] = x[where]
            x[where] = 0
        return int(where.size)

    def chunk_maxima(self, x: Array, plan: Plan, chunk: int, indices: Array) -> None:
        at = 0
        for group, count in enumerate(plan.counts.tolist()):
            where = positions(plan, group)
            key = keys(x[where])
            rows = np.append(key, np.zeros(-key.size % chunk, key.dtype)).reshape(count, chunk)
            indices[at : at + count] = where[rows.argmax(axis=1) + chunk * np.arange(count)]
            at += count

    def sample(self, x: Array, plan: Plan, key: int, out: Array) -> None:
        where = positions(plan, 0)
        out[:] = x[where[sampled(out.size, where.size, key)]]

    def random_indices(self, plan: Plan, key: int, out: Array) -> None:
        at = 0
        for group, count in enumerate(plan.counts.tolist()):
            where = positions(plan, group)
            drawn = permuted(count, where.size, (key + group) % (1 << 64))
            out[at : at + count] = np.sort(where[drawn])
            at += count

    def take(self, x: Array, indices: Array, values: Array, *, clear: bool) -> None:
        values[:] = widen(x[indices], str(values.dtype))
        if clear:
            x[indices] = 0

    def pack(self, x: Array, plan: Plan, indices: Array, values: Array, message: Message) -> None:
        k = indices.size
        if message.indices.size:
            message.indices[:] = indices
        self._round(values, message.values[:k])
        x[indices] = values
        for start, stop in plan.dense.tolist():
            self._round(x[start:stop], message.values[k : k + stop - start])
            k += stop - start

    @staticmethod
    def _round(values: Array, out: Array) -> None:
        """Write the values in the type of `out`; leave the rounding error."""
        if out.itemsize >= values.itemsize:
            out[:] = values
            values[:] = 0
        else:
            limit = float(np.finfo(out.dtype).max)
            out[:] = np.clip(values, -limit, limit).astype(out.dtype)
            values -= out.astype(values.dtype)

    def merge(self, messages: Messages, dense: Array, divisor: int, out: Array) -> int:
        parts = list(messages.parts(dense))
        for rank, (indices, _) in enumerate(parts):
            if indices.size and (indices[-1] >= out.size or (indices[1:] <= indices[:-1]).any()):
                raise corrupt(rank, out.size)
        held = np.zeros(out.size, np.bool_)
        out.fill(0)
        with np.errstate(over="ignore", invalid="ignore"):
            for indices, values in parts:
                out[indices] += values[: indices.size].astype(out.dtype)
                held[indices] = True
                at = indices.size
                for start, stop in dense.tolist():
                    out[start:stop] += values[at : at + stop - start].astype(out.dtype)
                    held[start:stop] = True
                    at += stop - start
            out[held] /= divisor
        self._held = np.flatnonzero(held).astype(np.uint32)
        return int(self._held.size)

    def merge_sparse(
        self, messages: Messages, dense: Array, divisor: int, size: int, dtype: str
    ) -> tuple[Array, Array]:
        out = np.empty(size, dtype)
        ReferenceDevice.merge(self, messages, dense, divisor, out)
        return self._held, out[self._held]

    def combine(
        self, mine: Message, theirs: Message, plan: Plan, out: Message, indices: Array, values: Array
    ) -> bool:
        k = plan.total
        first = np.append(0, np.cumsum(plan.counts))
        if (theirs.indices[1:] <= theirs.indices[:-1]).any():
            raise misplaced()
        both = np.union1d(mine.indices, theirs.indices)
        sums, held = np.zeros(both.size, values.dtype), np.zeros(both.size, np.bool_)
        at = np.searchsorted(both, mine.indices)
        sums[at], held[at] = mine.values[:k], True
        at = np.searchsorted(both, theirs.indices)
        with np.errstate(over="ignore"):
            sums[at] = np.where(held[at], sums[at] + theirs.values[:k], theirs.values[:k])
            dense = mine.values[k:] + theirs.values[k:]
        indices.fill(NOWHERE)
        values.fill(0)
        for (start, stop), here, end in zip(plan.extents.tolist(), first[:-1], first[1:], strict=True):
            if not (start <= theirs.indices[here] and theirs.indices[end - 1] < stop):
                raise misplaced()
            low, high = np.searchsorted(both, [start, stop])
            won = np.zeros(high - low, np.bool_)
            won[topk(sums[low:high], end - here)] = True
            out.indices[here:end], out.values[here:end] = both[low:high][won], sums[low:high][won]
            end = here + int((~won).sum())
            indices[here:end], values[here:end] = both[low:high][~won], sums[low:high][~won]
        out.values[k:] = dense
        return sound(sums) and sound(dense)

    def put_back(self, x: Array, indices: Array, values: Array, winners: Array, *, among: bool) -> None:
        chosen = (np.isin(indices, winners) == among) & (indices != NOWHERE)
        x[indices[chosen]] += values[chosen]

    def divide(self, x: Array, divisor: int) -> bool:
        with np.errstate(invalid="ignore"):
            x /= divisor
        return bool(np.isfinite(x).all())
