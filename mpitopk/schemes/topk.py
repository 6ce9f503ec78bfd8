"""The k entries of largest magnitude, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.collectives import Allgatherv
from mpitopk.errors import ConfigError, nearest
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.qsgd import QSGD
from mpitopk.schemes.rounding import Rounding
from mpitopk.schemes.sparsifier import Memory, Sparsifier

if TYPE_CHECKING:
    from mpitopk.typing import Array

VALUES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the exact k largest entries of residual + gradient; keep the rest as the residual.

    Aji & Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017 (gradient
    dropping, here with an exact k); Alistarh et al., "The convergence of sparsified gradient
    methods", NeurIPS 2018, Algorithm 1.

    Parameters
    ----------
    density, per_segment, dense_below
        See `Sparsifier`.
    values : {"float16", "float32", "float64"} or QSGD, optional
        How values travel; by default in the type of the residual. With `QSGD(bits=4)` they are rounded at
        random to its levels, as in Basu et al., "Qsparse-local-SGD", NeurIPS 2019, section 3; "qsgd" is
        that of a command line. What rounding loses stays in the residual.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Receives P (4 + value size) k bytes a rank, against about 2 n times the value size for a dense
    ring: it pays below a density of about 1 / P. The size of a value is bits / 8 + 4 / bucket with `QSGD`.

    Examples
    --------
    >>> TopK(density=0.01, dense_below=1024).describe()
    'TopK(density=0.01, per_segment=False, dense_below=1024, values=None)'
    """

    about = About("Aji & Heafield 2017; Alistarh et al. 2018", "k values, k indices", "allgatherv", "2 n")

    values: str | QSGD | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values == "qsgd":
            object.__setattr__(self, "values", QSGD())
        if isinstance(self.values, QSGD):
            if self.values.coding != "fixed":
                raise ConfigError("values has coding='elias': give 'fixed', which is less where few are 0")
        elif self.values is not None and self.values not in VALUES:
            raise ConfigError(f"values is {self.values!r}: {nearest(str(self.values), (*VALUES, 'qsgd'))}")

    def values_type(self, rank: Rank) -> str:
        return self.values if isinstance(self.values, str) else rank.layout.accumulator

    def init(self, rank: Rank) -> Memory:
        memory = super().init(rank)
        if isinstance(self.values, QSGD):
            memory.rounding = Rounding(rank, self.values, memory)
            if self.fixed:
                memory.rounding.fit()
        return memory

    def stand_in(self, state: Memory) -> Allgatherv | None:
        return Allgatherv(state.rounding.fit() if state.rounding else state.message) if self.fixed else None

    def select(self, rank: Rank, state: Memory, gradient: Array) -> bool:
        """Accumulate the gradient in `state.spare` and move the winners out; return whether all is finite."""
        return rank.device.accumulate_select(
            gradient, state.residual, state.spare, state.plan, state.indices, state.values
        )

    def step(self, rank: Rank, state: Memory, gradient: Array, sparse: bool) -> Steps:
        state.prepare(self, rank)
        rounding = state.rounding
        finite = self.select(rank, state, gradient)
        message = rounding.fit() if rounding else state.message
        if finite:
            rank.device.pack(state.spare, state.plan, state.indices, state.values, state.message)
            if rounding:
                rounding.encode()
        rank.sent = state.indices.size + state.plan.dense_total
        messages = yield Allgatherv(message, fixed=self.fixed, finite=finite)
        if rounding:
            messages = rounding.decode(messages)
        return state.finish(rank, messages, rank.size, sparse=sparse)
