"""No compression: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.collectives import Allreduce
from mpitopk.schemes.base import About, Rank, Scheme, Steps, Whole

if TYPE_CHECKING:
    from mpitopk.typing import Array


class _Buffers(Whole):
    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        layout = rank.layout
        widened = layout.storage != layout.accumulator
        self.wide = rank.device.empty(layout.size if widened else 0, layout.accumulator)


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
        return state.result(sparse=sparse)
