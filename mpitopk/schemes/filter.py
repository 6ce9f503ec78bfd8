"""A filter that most probably lets all of the k largest entries pass, in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from mpitopk.errors import ConfigError
from mpitopk.schemes.base import About, Rank, check_seed
from mpitopk.schemes.threshold import Sampling, Thresholded, move_exactly, select_by

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array


class Margins(NamedTuple):
    """How a threshold is taken from a sample.

    Attributes
    ----------
    size, place : int
        Entries of the sample; the threshold is the place-th largest magnitude among them.
    most : int
        Entries that may pass.
    """

    size: int
    place: int
    most: int


@dataclass(frozen=True)
class Filter(Thresholded):
    """Send all entries from a threshold on that is most probably below all of the k largest.

    An approximate selection with a bound on what it misses. `TopK` is the exact one: its window comes from
    a sample in the same way, and it looks once more at what passed, and repairs a miss.

    Let m of the n entries be looked at, one at random of each of m equal parts, and the threshold be the
    r-th largest magnitude among them. It is above the k-th largest of all only if at least r of the sample
    are among the k largest. Their number is a sum of independent draws with mean m k / n, of which the
    upper tail is at most that of the binomial distribution B(m, k / n): Hoeffding, "On the distribution of
    the number of successes in independent trials", Annals of Mathematical Statistics 27, 1956. r is the
    least number, above the mean by at least one, with

        P(B(m, k / n) >= r) = I(k / n; r, m - r + 1) <= failure

    where I is the regularised incomplete beta function, the distribution of the r-th order statistic. In the
    same way more than c entries pass, where no two are equal, only if fewer than r of the sample are among
    the c largest. There is room for the least c with P(B(m, c / n) < r) <= failure; if more pass, the
    exact k largest are sent instead. Fewer than k pass in a miss: those are the largest, and all are sent.

    Parameters
    ----------
    density, dense_below, values
        See `TopK`. `per_segment` is refused: there is one threshold.
    failure : float
        Probability with which some of the k largest may be missed, and with which the exact selection may
        be needed; from 1e-20 to 0.5.
    sample : int
        How many of the k largest are in the sample, on average. With 100, r n / m = 1.33 k entries pass on
        average, with 1000 1.1 k. Where the sample had more than a quarter of the entries, none is taken: the
        exact k largest are sent.
    seed : int
        In [0, 2**32). With step and rank it determines the sample.

    Raises
    ------
    ConfigError
        If an option is out of range.
    """

    about = About("after Hoeffding 1956 (bound)", "about 1.3 k values and indices", "allgatherv", "2 n")

    failure: float = 1e-3
    sample: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.failure, int | float) or not 1e-20 <= self.failure <= 0.5:
            raise ConfigError(f"failure is {self.failure!r}: give a number from 1e-20 to 0.5")
        if not isinstance(self.sample, int) or self.sample < 1:
            raise ConfigError(f"sample is {self.sample!r}: give a whole number from 1")
        check_seed(self.seed)

    def new_memory(self, rank: Rank) -> Sampling:
        return Sampling(rank)

    def margins(self, plan: Plan) -> Margins | None:
        """Return how a threshold is found; None where the exact selection is as good."""
        n, k = plan.sparse_total, plan.total
        if k == 0 or 4 * self.sample > k:
            return None
        found = margins(n, k, -(-self.sample * n // k), self.failure)
        return found if found.place < found.size else None

    def most(self, plan: Plan) -> int:
        found = self.margins(plan)
        return found.most if found else plan.total

    def select(self, rank: Rank, state: Sampling, gradient: Array) -> bool:  # type: ignore[override]
        return select_by(self._move, self, rank, state, gradient)

    def _move(self, rank: Rank, state: Sampling) -> int:
        x, found = state.spare, self.margins(state.plan)
        if found is None:
            return move_exactly(rank, state)
        threshold = state.sampler(rank, found.size, found.place).threshold(rank, x, self.seed)
        count = rank.device.move_above(x, state.plan, threshold, 0, *state.room)
        return count if count <= found.most else move_exactly(rank, state)


@cache
def margins(n: int, k: int, m: int, failure: float) -> Margins:
    """Return the margins for the k largest of n entries and a sample of m; see `Filter`."""
    mean = m * k / n
    r = min(m, math.ceil(mean + 12 * math.sqrt(mean) + 60))  # beyond, by Chernoff, there is less than 1e-40
    tail = 0.0
    while r > mean + 1 and tail + (here := _binomial(m, k / n, r)) <= failure:
        tail += here
        r -= 1
    r += 1

    def overflows(c: int) -> bool:
        return math.fsum(_binomial(m, c / n, j) for j in range(r)) > failure

    low, high = -(-r * n // m) - 1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if overflows(middle) else (low, middle)
    return Margins(m, r, high)


def _binomial(m: int, p: float, j: int) -> float:
    """Return the probability of j among m draws, 0 < p < 1."""
    ways = math.lgamma(m + 1) - math.lgamma(j + 1) - math.lgamma(m - j + 1)
    return math.exp(ways + j * math.log(p) + (m - j) * math.log1p(-p))
