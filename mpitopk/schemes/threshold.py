"""What the schemes share that send all entries from some magnitude on: about k, not as many on every rank."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.errors import ConfigError
from mpitopk.schemes.base import Rank
from mpitopk.schemes.sparsifier import Memory
from mpitopk.schemes.topk import TopK

if TYPE_CHECKING:
    from mpitopk.typing import Array


@dataclass(frozen=True)
class Thresholded(TopK):
    """Send the entries of residual + gradient that a threshold lets pass; sizes are exchanged first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_per_segment(self)

    @property
    def fixed(self) -> bool:
        return False

    @abstractmethod
    def move(self, rank: Rank, state: Memory) -> int:
        """Move what is to be sent from `state.spare` to `state.room`; return how many entries."""

    def select(self, rank: Rank, state: Memory, gradient: Array) -> bool:
        finite = rank.device.accumulate(gradient, state.residual, state.spare)
        some = finite and state.plan.total > 0
        state.hold(self.move(rank, state) if some else 0, self, rank)
        return finite


def refuse_per_segment(scheme: TopK) -> None:
    """Raise `ConfigError` unless one threshold is asked for."""
    if scheme.per_segment:
        raise ConfigError(
            "per_segment is True: give False, since there is one threshold for the whole buffer"
        )


def move_exactly(rank: Rank, state: Memory) -> int:
    """Move the k largest entries, where no threshold can be found."""
    device, k = rank.device, state.plan.total
    indices, values = (x[:k] for x in state.room)
    device.select(state.spare, state.plan, indices, values)
    device.take(state.spare, indices, values, clear=True)
    return k
