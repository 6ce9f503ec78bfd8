"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.collectives import Allreduce
from mpitopk.schemes.base import About, Rank, Scheme, Sparse, State, Steps

if TYPE_CHECKING:
    from mpitopk.typing import Array


class _Buffers(State):
    def __init__(self, rank: Rank) -> None:
        layout = rank.layout
        self.mean = rank.device.empty(layout.size, layout.accumulator)
        widened = layout.storage != layout.accumulator
        self.wide = rank.device.empty(layout.size if widened else 0, layout.accumulator)
        self._size, self._device = layout.size, rank.device

    @cached_property
    def indices(self) -> Array:
        """All of them; only a sparse mean wants to know."""
        return self._device.from_host(np.arange(self._size, dtype=np.uint32))

    @property
    def saved(self) -> dict[str, Array]:
        return {}


@dataclass(frozen=True)
class Dense(Scheme):
    """Every entry of every gradient, by allreduce.

    The two lines that it replaces: `comm.Allreduce(gradient, mean); mean /= comm.size`. 16-bit
    gradients are summed, and sent, in float32.
    """

    about = About("", "n values", "allreduce", "n")

    def init(self, rank: Rank) -> _Buffers:
        return _Buffers(rank)

    def stand_in(self, state: _Buffers) -> Allreduce:
        return Allreduce(state.mean, state.mean)

    def step(self, rank: Rank, state: _Buffers, gradient: Array, sparse: bool) -> Steps:
        finite = True
        if state.wide.size:
            finite = rank.device.accumulate(gradient, None, state.wide)
            gradient = state.wide
        yield Allreduce(gradient, state.mean, finite=finite)
        rank.sent = rank.held = state.mean.size
        if sparse:
            return Sparse(state.indices, state.mean)
        return state.mean
