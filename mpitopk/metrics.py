"""What the steps so far have cost."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpitopk.costs import allreduce_bytes, break_even
from mpitopk.errors import CompressionWarning

if TYPE_CHECKING:
    from mpitopk.schemes.base import Rank, Scheme


@dataclass
class Metrics:
    """Totals since the runtime was made, unless said otherwise.

    Attributes
    ----------
    steps, skipped : int
        Steps that were taken; steps that were skipped because of NaN or Inf.
    bytes : int
        Received by this rank (a ring makes it send about as many).
    dense_bytes : int
        What a ring allreduce of the same gradients would have made it receive.
    density : float
        Part of the entries that this rank sent, in the last step.
    union : float
        Part of the entries that some rank sent, in the last step.
    fallbacks : int
        Selections whose window missed, so that they took the slow path (and are as exact).
    seconds : dict of str to float
        Time in each phase: accumulate (fused with select where possible), select, pack, exchange,
        merge; in the parts of exchange, wait and transfer; and in the ranges of the user.
    """

    steps: int = 0
    skipped: int = 0
    bytes: int = 0
    dense_bytes: int = 0
    density: float = 0.0
    union: float = 0.0
    fallbacks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, rank: Rank) -> None:
        """Take note of a step that has been taken."""
        layout = rank.layout
        self.steps += 1
        self.dense_bytes += allreduce_bytes(layout.nbytes, rank.size)
        self.density = rank.sent / max(1, layout.size)
        self.union = rank.held / max(1, layout.size)

    def warn_if_dear(self, scheme: Scheme, rank: Rank) -> None:
        """Warn, on rank 0 after the first step, if a dense allreduce would have moved less."""
        if rank.id == 0 and self.steps == 1 and self.bytes >= self.dense_bytes > 0:
            pays = f"an allgatherv pays below about {break_even(rank.size, 4):.2g} on this many ranks"
            if scheme.shortens:
                remedy = "give fewer bits"
            elif self.density < 1:
                remedy = f"lower the density ({pays})"
            else:
                return
            warnings.warn(
                f"{scheme.describe()} moves {self.bytes} bytes a step and rank, a dense allreduce "
                f"{self.dense_bytes}: {remedy}, or use Dense()",
                CompressionWarning,
                stacklevel=3,
            )
