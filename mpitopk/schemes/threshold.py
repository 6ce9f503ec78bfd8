"""What the schemes share that send all entries from some magnitude on: about k, not as many on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpitopk.errors import ConfigError
from mpitopk.plan import Plan
from mpitopk.schemes.base import Rank
from mpitopk.schemes.sparsifier import Memory
from mpitopk.schemes.topk import TopK

if TYPE_CHECKING:
    from mpitopk.typing import Array

Move: TypeAlias = Callable[[Rank, Any], int]
"""Moves entries from `state.spare` to `state.room`; returns how many."""


@dataclass(frozen=True)
class Thresholded(TopK):
    """Send the entries of residual + gradient that a threshold lets pass; sizes are exchanged first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_per_segment(self)

    @property
    def fixed(self) -> bool:
        return False


def select_by(move: Move, scheme: TopK, rank: Rank, state: Memory, gradient: Array) -> bool:
    """Accumulate the gradient in `state.spare`, hold what is moved out; return whether all is finite."""
    finite = rank.device.accumulate(gradient, state.residual, state.spare)
    some = finite and state.plan.total > 0
    state.hold(move(rank, state) if some else 0, scheme, rank)
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


class Sampler:
    """The place-th largest magnitude of a sample of the entries to select from; see `Sampling`."""

    def __init__(self, rank: Rank, plan: Plan, size: int, place: int) -> None:
        device, dtype = rank.device, rank.layout.accumulator
        self.plan = plan
        self._of = Plan(np.array([[0, size, 0]], np.int64), np.array([place], np.int64))
        self._sample = device.empty(size, dtype)
        self._largest = device.empty(place, "uint32"), device.empty(place, dtype)

    def threshold(self, rank: Rank, x: Array, seed: int) -> float:
        """Return the magnitude; seed, step and rank determine which entries are looked at."""
        device, values = rank.device, self._largest[1]
        device.sample(x, self.plan, rank.key(seed), self._sample)
        device.select(self._sample, self._of, *self._largest)
        return float(np.abs(device.mirror(values, "the sample")).min())


class Sampling(Memory):
    """Error feedback, and room for a sample."""

    _sampler: Sampler | None = None

    def sampler(self, rank: Rank, size: int, place: int) -> Sampler:
        """Return what samples `size` entries for the present plan: 0 < place < size."""
        if self._sampler is None or self._sampler.plan is not self.plan:
            self._sampler = Sampler(rank, self.plan, size, place)
        return self._sampler
