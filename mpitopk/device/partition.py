"""Selection on a GPU by CuPy's own operations: an oracle, and what the kernels are measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.device.base import TOO_LARGE
from mpitopk.device.cuda import CudaDevice
from mpitopk.device.launch import Array

if TYPE_CHECKING:
    from mpitopk.plan import Plan

LIMIT = int(np.float32(TOO_LARGE["float32"]).view(np.uint32))


class PartitionDevice(CudaDevice):
    """The current GPU, with winners found by `cupy.partition`.

    Its `kth` counts from the small end, and beyond 511 it sorts the whole array: with few winners among
    many entries, always. Each group waits for the GPU several times, scratch memory is a few times that
    of the gradient, and CuPy assigns to given positions only among fewer than 2**31 entries.
    """

    def accumulate_select(
        self, gradient: Array, residual: Array, out: Array, plan: Plan, indices: Array, values: Array
    ) -> bool:
        if not CudaDevice.accumulate(self, gradient, residual, out):
            return False
        _select(out, plan, indices, values)
        out[indices] = 0
        return True

    def select(self, x: Array, plan: Plan, indices: Array, values: Array) -> bool:
        return _select(x, plan, indices, values)


def _select(x: Array, plan: Plan, indices: Array, values: Array) -> bool:
    """Copy the winners of each group; return whether every entry is sound.

    Dense pieces, which may lie within a group, have the lowest key.
    """
    keys = (x.view("uint32") & 0x7FFFFFFF) + 1
    unsound = int((keys > LIMIT).sum())
    for start, stop in plan.dense.tolist():
        keys[start:stop] = 0
    at = 0
    for group, count in enumerate(plan.counts.tolist()):
        rows = plan.pieces[plan.pieces[:, 2] == group]
        start, stop = int(rows[0, 0]), int(rows[-1, 1])
        indices[at : at + count] = _topk(keys[start:stop], count) + start
        at += count
    values[:] = x[indices]
    return unsound == 0


def _topk(keys: Array, k: int) -> Array:
    """Return the positions of the k largest keys, ascending: of equal ones the first."""
    kth = cupy.partition(keys, keys.size - k)[keys.size - k]
    won = keys > kth
    ties = cupy.flatnonzero(keys == kth)
    won[ties[: k - int(won.sum())]] = True
    return cupy.flatnonzero(won)
