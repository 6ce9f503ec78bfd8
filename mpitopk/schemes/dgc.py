"""Deep gradient compression: top-k of locally accumulated momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.errors import ConfigError, nearest
from mpitopk.schemes.base import About, Rank, check_seed
from mpitopk.schemes.threshold import Sampling, move_exactly, refuse_per_segment, select_by
from mpitopk.schemes.topk import TopK

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array

SELECTORS = ("exact", "sampled")
ROUNDS = 10


class Velocity(Sampling):
    """Error feedback of velocities instead of gradients: `residual` is the velocity not sent yet."""

    def __init__(self, rank: Rank, scheme: DGC) -> None:
        super().__init__(rank)
        layout, device = rank.layout, rank.device
        self.momentum = device.zeros(layout.size, layout.accumulator)
        self.next_momentum = device.empty(layout.size, layout.accumulator)
        self.step = device.empty(layout.size if scheme.nesterov else 0, layout.accumulator)
        self._masked = scheme.masking

    @property
    def saved(self) -> dict[str, Array]:
        return {**super().saved, "momentum": self.momentum}

    def commit(self) -> None:
        if self._masked:
            self._device.take(self.next_momentum, self.indices, self.values, clear=True)
        self.momentum, self.next_momentum = self.next_momentum, self.momentum
        super().commit()


@dataclass(frozen=True)
class DGC(TopK):
    """Momentum is applied by every rank to its own gradients, before the largest entries are sent.

    Lin et al., "Deep gradient compression", ICLR 2018, sections 3.1 to 3.3: with momentum applied after
    the exchange, entries that were delayed have lost their weight. With u the momentum and v the velocity
    of a rank: u = m u + g, v = v + u; the largest entries of v are sent, and cleared in v and, by momentum
    factor masking, in u. **The optimiser must not apply momentum to the mean.** `mpitopk.warmup` is the
    paper's schedule of densities.

    The sampled selector is the authors', with their numbers: of a sample of n / 100 entries, but at least so
    many that two of the k largest are among them on average, the magnitude that k / n of the sample reach
    is the threshold. Where more than 1.3 k of all entries reach it, the exact k largest are sent; where
    fewer than 0.8 k do, it is lowered to 0.8 of itself, up to ten times. Ours differs in three points: the
    sample has one entry at random of each of equal parts, instead of every m-th, with which the columns of a
    matrix may be aligned; from 0.8 k to 1.3 k entries all are sent, instead of the first k by position, after
    which the end of the buffer would always wait; where ten times are not enough, the exact k largest are.

    Parameters
    ----------
    density, per_segment, dense_below, values
        See `TopK`. Entries that are sent dense keep their momentum, so that a density of 1 is dense SGD
        with momentum.
    momentum : float
        m, in [0, 1).
    nesterov : bool
        Nesterov's form: u = m (u + g), v = v + u + g.
    masking : bool
        Whether the momentum of entries that are sent is cleared.
    selector : {"exact", "sampled"}
        Sampled, ranks send different numbers of entries, so that sizes are exchanged first; `per_segment` is
        refused, since there is one threshold; and very few entries are selected from exactly.
    seed : int
        In [0, 2**32). With step and rank it determines the sample.
    clip : float, optional
        2-norm to which a single worker would clip its gradient; P ranks clip to clip / sqrt(P) each.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Memory: four buffers of the layout's length (five with `nesterov`). Weight decay belongs into the
    gradient that is given, not after the exchange.
    """

    about = About("Lin et al. 2018", "k values, k indices", "allgatherv", "4 n")
    has_momentum = True

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    selector: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum!r}: give a number from 0 and below 1")
        if self.clip is not None and not (isinstance(self.clip, int | float) and 0 < self.clip < math.inf):
            raise ConfigError(f"clip is {self.clip!r}: give a number above 0, or None")

        if self.selector not in SELECTORS:
            raise ConfigError(f"selector is {self.selector!r}: {nearest(str(self.selector), SELECTORS)}")
        if self.selector == "sampled":
            refuse_per_segment(self)
        check_seed(self.seed)

    @property
    def fixed(self) -> bool:
        return super().fixed and self.selector == "exact"

    def most(self, plan: Plan) -> int:
        return plan.total if self.selector == "exact" else 13 * plan.total // 10

    def new_memory(self, rank: Rank) -> Velocity:
        return Velocity(rank, self)

    def select(self, rank: Rank, state: Velocity, gradient: Array) -> bool:  # type: ignore[override]
        device, m = rank.device, self.momentum
        scale = self._scale(rank, gradient)
        of_gradient = m * scale if self.nesterov else scale
        device.accumulate(gradient, state.momentum, state.next_momentum, scale=of_gradient, keep=m)
        step = state.next_momentum
        if self.nesterov:
            step = state.step
            device.accumulate(gradient, state.next_momentum, step, scale=scale)
        if self.selector == "exact":
            return super().select(rank, state, step)
        return select_by(self._move, self, rank, state, step)

    def _move(self, rank: Rank, state: Velocity) -> int:
        x, plan, k = state.spare, state.plan, state.plan.total
        n = plan.sparse_total
        size = max(-(-n // 100), -(-2 * n // k))
        place = -(-size * k // n)
        if not place < size < n:
            return move_exactly(rank, state)
        threshold = state.sampler(rank, size, place).threshold(rank, x, self.seed)
        least, most = -(-8 * k // 10), self.most(plan)
        for _ in range(ROUNDS):
            count = rank.device.move_above(x, plan, threshold, least, *state.room)
            if least <= count <= most:
                return count
            if count > most:
                break
            threshold *= 0.8
        return move_exactly(rank, state)

    def _scale(self, rank: Rank, gradient: Array) -> float:
        if self.clip is None:
            return 1.0
        norm, most = rank.device.norm(gradient), self.clip / math.sqrt(rank.size)
        return most / norm if norm > most else 1.0
