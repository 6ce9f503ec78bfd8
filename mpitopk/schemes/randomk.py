"""k random entries, the same ones on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.collectives import Allreduce
from mpitopk.device.hashing import splitmix64
from mpitopk.schemes.base import About, Rank, Steps, check_seed
from mpitopk.schemes.sparsifier import Memory, Sparsifier

if TYPE_CHECKING:
    from mpitopk.typing import Array


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Send k entries drawn from a seed that all ranks share; no indices travel.

    Stich, Cordonnier & Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (rand-k with memory).

    Parameters
    ----------
    density, per_segment, dense_below
        See `Sparsifier`.
    seed : int
        In [0, 2**32). Together with the step it determines the entries.
    feedback : bool
        Whether what is not sent is kept as the residual. Without it the rest of the gradient is
        lost, as in the random-k of Yoon & Oh, arXiv 2209.08497: an ablation, not a way to train.

    Raises
    ------
    ConfigError
        If an option is out of range.
    """

    about = About("Stich, Cordonnier & Jaggi 2018", "k values", "allreduce", "2 n")

    seed: int = 0
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    @property
    def keeps(self) -> bool:
        return self.feedback

    def stand_in(self, state: Memory) -> Allreduce | None:
        return Allreduce(state.message.values, state.message.values) if self.fixed else None

    def step(self, rank: Rank, state: Memory, gradient: Array, sparse: bool) -> Steps:
        device = rank.device
        state.prepare(self, rank)
        plan, accumulated = state.plan, state.spare
        residual = state.residual if self.feedback else None
        finite = device.accumulate(gradient, residual, accumulated)
        key = splitmix64(self.seed << 32 | rank.step)  # mixed, since groups take key, key + 1, ...
        device.random_indices(plan, key, state.indices)
        device.take(accumulated, state.indices, state.values, clear=True)
        device.pack(accumulated, plan, state.indices, state.values, state.message)
        mean = state.blank("receive", self, rank)
        mean.indices[:] = state.message.indices
        yield Allreduce(state.message.values, mean.values, fixed=self.fixed, finite=finite)
        rank.sent = plan.total + plan.dense_total
        return state.finish(rank, mean.alone, 1, sparse=sparse)
