"""The sum of two messages on a GPU: the kernels of combine.cu, and selection among what they add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.device.launch import STRETCH, THREADS, Array, allocate, clear, launch, processors
from mpitopk.device.selector import Selector
from mpitopk.plan import Plan

if TYPE_CHECKING:
    from mpitopk.wire import Message


class Pairs:
    """What two messages of one plan are added up in: twice as many slots as each has entries."""

    def __init__(self, plan: Plan) -> None:
        self.plan, k = plan, plan.total
        if k == 0:
            return
        ends = np.cumsum(plan.counts)
        starts = ends - plan.counts
        slots = np.column_stack([2 * starts, 2 * ends, np.arange(ends.size)])
        self._selector = Selector(Plan(slots, plan.counts))
        self._groups = cupy.asarray(np.column_stack([plan.extents, starts]).reshape(-1))
        self._slots, self._sums = allocate(2 * k, "uint32"), allocate(2 * k, "float32")
        self._winners, self._inside = allocate(k, "uint32"), allocate(k + 1, "uint32")
        self._stretches = allocate(-(-(k + 1) // STRETCH), "uint32")

    def run(
        self, mine: Message, theirs: Message, out: Message, dropped: tuple[Array, Array], *report: Array
    ) -> bool:
        """Return whether every sum is sound; `report`: where `common` tells what it finds."""
        size = self.plan.total
        k, blocks = np.uint32(size), min(-(-2 * size // THREADS), 16 * processors())
        groups, before = (self._groups, np.int32(self.plan.counts.size)), (self._inside, self._stretches)
        slots, sums, winners = self._slots, self._sums, self._winners
        launch("common", self._stretches.size, mine.indices, theirs.indices, k, *groups, *before, *report)
        clear(slots)
        clear(sums)
        launch(
            "add", blocks, mine.indices, mine.values, theirs.indices, theirs.values, k, *groups, *before,
            report[0], slots, sums,
        )  # fmt: skip
        finite, _ = self._selector.run(sums, None, None, winners, out.values[:size])
        if finite:
            launch("split", blocks, slots, sums, winners, k, out.indices, *dropped)
        return finite
