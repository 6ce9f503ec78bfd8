"""ScaleCom: one rank by turns chooses the entries that all send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.collectives import Allgatherv, Allreduce
from mpitopk.errors import ConfigError
from mpitopk.plan import make_chunk_plan
from mpitopk.schemes.base import About, Density, Rank, Steps
from mpitopk.schemes.sparsifier import Memory, Planned, Sparsifier
from mpitopk.wire import Message, message_bytes

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array


class Led(Memory):
    """Error feedback, and the message of indices that a leader sends, and others leave empty."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._rank = rank

    @property
    def leader(self) -> int:
        """The rank that chooses in this step."""
        return self._rank.step % self._rank.size

    def prepare(self, scheme: Planned, rank: Rank) -> None:
        """Make room for all that a step needs, so that nothing can fail between its collectives."""
        super().prepare(scheme, rank)
        self._room_for_choice = self.grown("choice", message_bytes(self.plan.total, 0, 0))
        self.mean = self.blank("receive", scheme, rank)

    def choice(self) -> Allgatherv:
        """Return the collective that takes the leader's indices, once they are in, to all ranks."""
        rank, k = self._rank, self.plan.total
        sizes = [message_bytes(0, 0, 0)] * rank.size
        sizes[self.leader] = message_bytes(k, 0, 0)
        count = k if rank.id == self.leader else 0
        message = Message.blank(self._room_for_choice, count, 0, None, rank.layout.digest)
        return Allgatherv(message, sizes=sizes)


@dataclass(frozen=True)
class ScaleCom(Sparsifier):
    """Send the k entries that are largest on the rank whose turn it is, so that no indices build up.

    Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient
    distributed training", NeurIPS 2020, arXiv 2104.11125: cyclic local top-k (CLT-k) with a low-pass
    filter on the memory m. With p = m + gradient, all ranks send p at the leader's indices, and
    m = (1 - beta) m + beta (p - what was sent). What a rank receives hardly grows with their number.

    Parameters
    ----------
    density, per_segment, dense_below
        See `Sparsifier`. Without a density, give `chunk`.
    beta : float
        In (0, 1]. 1 is plain error feedback; less lets what was not sent come back more slowly, which
        the authors use (0.1 to 0.3) for large batches.
    chunk : int, optional
        From 1 on, instead of a density: the leader chooses the largest entry of every `chunk` consecutive
        ones, of all segments that are not sent whole, or of each with `per_segment`; of equal ones the first.
        It takes one pass, and is the authors' way to select.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Nothing is lost: sum of what was sent + m / beta = sum of gradients. A checkpoint holds m.
    """

    about = About("Chen et al. 2020", "k values; the leader k indices", "allgatherv, allreduce", "2 n")

    density: Density | None = None  # type: ignore[assignment]
    beta: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if (self.density is None) == (self.chunk is None):
            raise ConfigError(f"density is {self.density!r} and chunk is {self.chunk!r}: give one of them")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ConfigError(f"chunk is {self.chunk!r}: give a whole number from 1")
        super().__post_init__()
        if not isinstance(self.beta, int | float) or not 0 < self.beta <= 1:
            raise ConfigError(f"beta is {self.beta!r}: give a number above 0 and up to 1")

    def density_at(self, step: int) -> float:
        return 1 / self.chunk if self.chunk else super().density_at(step)

    def plan(self, rank: Rank) -> Plan:
        if self.chunk is None:
            return super().plan(rank)
        return make_chunk_plan(
            rank.layout, self.chunk, per_segment=self.per_segment, dense_below=self.dense_below
        )

    def choose(self, rank: Rank, state: Led, gradient: Array) -> bool:
        """Accumulate the gradient and move out what the leader sends; return whether all is finite."""
        device, candidates, plan = rank.device, state.spare, state.plan
        if self.chunk is None:
            return device.accumulate_select(
                gradient, state.residual, candidates, plan, state.indices, state.values
            )
        finite = device.accumulate(gradient, state.residual, candidates)
        device.chunk_maxima(candidates, plan, self.chunk, state.indices)
        device.take(candidates, state.indices, state.values, clear=True)
        return finite

    def new_memory(self, rank: Rank) -> Led:
        return Led(rank)

    def stand_in(self, state: Led) -> Allgatherv | None:
        return state.choice() if self.fixed else None

    def step(self, rank: Rank, state: Led, gradient: Array, sparse: bool) -> Steps:
        device = rank.device
        state.prepare(self, rank)
        plan, candidates, request = state.plan, state.spare, state.choice()
        if rank.id == state.leader:
            finite = self.choose(rank, state, gradient)
            request.message.indices[:] = state.indices
        else:
            finite = device.accumulate(gradient, state.residual, candidates)
        messages = yield Allgatherv(request.message, self.fixed, finite, request.sizes)
        if rank.id != state.leader:
            count = min(plan.total, messages.counts[state.leader])  # less where schedules differ
            leads = messages.buffer[messages.starts[state.leader] :]
            state.indices[:count] = Message.parse(leads, count, 0, None).indices
            state.indices[count:] = 0
            device.take(candidates, state.indices, state.values, clear=True)
        device.pack(candidates, plan, state.indices, state.values, state.message)
        mean = state.mean
        mean.indices[:] = state.message.indices
        yield Allreduce(state.message.values, mean.values, self.fixed)
        if self.beta < 1:
            device.accumulate(candidates, state.residual, candidates, scale=self.beta, keep=1 - self.beta)
        rank.sent = plan.total + plan.dense_total
        return state.finish(rank, mean.alone, 1, sparse=sparse)
