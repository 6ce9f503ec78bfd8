"""What is compared: top-k by our selection, by others that yield the same winners, and other schemes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpitopk import Dense, RandomK, Scheme, TopK
from mpitopk.device import _native
from mpitopk.plan import Plan
from mpitopk.schemes import Rank
from mpitopk.schemes.sparsifier import Memory

Array = np.ndarray[Any, Any]


def by_sorting(x: Array, indices: Array, values: Array) -> None:
    """Sort all magnitudes, then collect what is not below the k-th; of equal ones the first."""
    k, magnitudes = indices.size, np.abs(x)
    cut = np.sort(magnitudes)[-k]
    found = np.flatnonzero(magnitudes >= cut)
    if surplus := found.size - k:
        found = np.delete(found, np.flatnonzero(magnitudes[found] == cut)[-surplus:])
    indices[:] = found
    np.take(x, found, out=values)


SELECTIONS: dict[str, Callable[[Array, Array, Array], None]] = {
    "sort": by_sorting,
    "radix": _native.radix_topk,
}


@dataclass(frozen=True)
class TopKBy(TopK):
    """`TopK` with the selection of somebody else: the same winners, phases and messages.

    It passes over the accumulated gradient once more, since only ours selects while it accumulates.
    """

    by: str = "sort"

    def init(self, rank: Rank) -> Memory:
        """Make it the device's own selection, which the runtime then times as such."""
        chosen, take = SELECTIONS[self.by], rank.device.take

        def select(x: Array, plan: Plan, indices: Array, values: Array) -> None:
            assert not plan.dense_total
            ends = np.cumsum(plan.counts)[:-1]
            parts = zip(plan.extents, np.split(indices, ends), np.split(values, ends), strict=True)
            for (start, stop), where, what in parts:
                chosen(x[start:stop], where, what)
                where += np.uint32(start)
            take(x, indices, values, clear=True)

        rank.device.select = select  # type: ignore[method-assign,assignment]
        return super().init(rank)

    def select(self, rank: Rank, state: Memory, gradient: Array) -> bool:
        """Accumulate, then select."""
        finite = rank.device.accumulate(gradient, state.residual, state.spare)
        rank.device.select(state.spare, state.plan, state.indices, state.values)
        return finite


@dataclass(frozen=True)
class Contestant:
    """A scheme, its name in tables, and how it is drawn (colours of Okabe & Ito 2008).

    `sparse`: whether it asks for the mean's non-zero entries only.
    """

    label: str
    make: Callable[[float], Scheme]
    colour: str
    marker: str
    sparse: bool = False


CONTESTANTS = {
    "dense": Contestant("dense", lambda _: Dense(), "#000000", "s"),
    "sort": Contestant("top-k, full sort", partial(TopKBy, by="sort"), "#d55e00", "^"),
    "radix": Contestant("top-k, one-thread radix select", partial(TopKBy, by="radix"), "#e69f00", "v"),
    "topk": Contestant("top-k, ours", TopK, "#009e73", "o"),
    "layers": Contestant("top-k, ours, layer-wise", partial(TopK, per_segment=True), "#56b4e9", "D"),
    "sparse": Contestant("top-k, ours, sparse mean", TopK, "#7a5195", "*", sparse=True),
    "randomk": Contestant("random-k", RandomK, "#0072b2", "P"),
    "forgetful": Contestant("random-k, no feedback", partial(RandomK, feedback=False), "#cc79a7", "X"),
}
