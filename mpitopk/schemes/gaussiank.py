"""GaussianK: a threshold from the quantile of a normal distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from mpitopk.errors import ConfigError
from mpitopk.schemes.base import About, Rank
from mpitopk.schemes.sparsifier import Memory
from mpitopk.schemes.threshold import Thresholded, move_exactly

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array


@dataclass(frozen=True)
class GaussianK(Thresholded):
    """Send what is above the threshold that k of n normal numbers would be above.

    Shi et al., "Understanding top-k sparsification in distributed deep learning", arXiv 1911.08772:
    residual + gradient is bell-shaped around 0. The threshold begins at z sqrt(mean of squares), where
    z is exceeded by k / n of the magnitudes of standard normal numbers. While more than 4 k / 3 or fewer
    than 2 k / 3 entries are from there on, it moves, as the authors': down to its half, or up by one half.
    Unlike theirs, once it is known to lie between two values, it moves to their geometric mean, so that it
    cannot swing. Where `rounds` are not enough, as for uniform or equal values, the exact k largest are sent.

    Parameters
    ----------
    density, dense_below, values
        See `TopK`. `per_segment` is refused: there is one threshold.
    rounds : int
        Thresholds to try, from 1 on. Each is one pass over the entries; later steps need more of them than
        the first, since the residual has few values above the last threshold.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Ranks send different numbers of entries; the sizes are exchanged first. Where all is zero nothing is sent.
    What is selected depends on magnitudes relative to each other only, but for numbers below the normal
    range. With `dense_below` the squares are added up piece by piece.
    """

    about = About("Shi et al. 2019", "2 k / 3 to 4 k / 3 values and indices", "allgatherv", "2 n")

    rounds: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rounds, int) or self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds!r}: give a whole number from 1")

    def most(self, plan: Plan) -> int:
        return 4 * plan.total // 3

    def select(self, rank: Rank, state: Memory, gradient: Array) -> bool:
        norm = rank.device.accumulate_norm(gradient, state.residual, state.spare, state.plan)
        state.hold(self._move(rank, state, norm) if norm else 0, self, rank)
        return norm is not None

    def _move(self, rank: Rank, state: Memory, norm: float) -> int:
        plan = state.plan
        n, k = plan.sparse_total, plan.total
        threshold = -NormalDist().inv_cdf(k / (2 * n)) * norm / math.sqrt(n)
        least = -(-2 * k // 3)
        count = rank.device.search_above(state.spare, plan, threshold, least, self.rounds, *state.room)
        return count or move_exactly(rank, state)
