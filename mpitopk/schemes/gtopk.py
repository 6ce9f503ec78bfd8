"""gTop-k: sparse messages merged two at a time, each cut down to k entries again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.butterfly import schedule
from mpitopk.collectives import Butterfly
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.sparsifier import Memory, Planned, Sparsifier
from mpitopk.wire import Message

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array


class Merging(Memory):
    """Error feedback, the merged message, and what this rank keeps of what merges drop."""

    def __init__(self, rank: Rank, *, conserving: bool) -> None:
        super().__init__(rank)
        self._keeps = sum(now.keeps for now in schedule(rank.id, rank.size)) if conserving else 0
        self._ready: Plan | None = None
        self.kept: list[tuple[Array, Array]] = []

    def prepare(self, scheme: Planned, rank: Rank) -> None:
        """Make room for all rounds, so that nothing can fail on one rank alone between them."""
        super().prepare(scheme, rank)
        self.kept = []
        plan = self.plan
        if plan is self._ready:
            return
        self._merged = self.blank("merged", scheme, rank)
        rows, k, dtype = self._keeps + 1, plan.total, self._accumulator
        indices = self.grown("dropped indices", 4 * k * rows).view("uint32")
        values = self.grown("dropped values", self.values.nbytes * rows).view(dtype)
        self._rows = [(indices[i * k : i * k + k], values[i * k : i * k + k]) for i in range(rows)]
        self._device.reserve(plan)
        self._ready = plan

    def merge(self, mine: Message, theirs: Message, keeps: bool) -> Message | None:
        """Return the largest entries of the sum; what they leave goes to the next row."""
        dropped = self._rows[len(self.kept)]
        if not self._device.combine(mine, theirs, self.plan, self._merged, *dropped):
            return None
        if keeps and self._keeps:
            self.kept.append(dropped)
        return self._merged

    def put_back(self, winners: Array) -> None:
        """Return to `spare` what was sent, or dropped on the way, and is in no mean."""
        device, message, k = self._device, self.message, self.plan.total
        device.put_back(self.spare, message.indices, message.values[:k], winners, among=False)
        for indices, values in self.kept:
            device.put_back(self.spare, indices, values, winners, among=True)


@dataclass(frozen=True)
class GTopK(Sparsifier):
    """Send the k largest entries through a butterfly of merges, each of which lets the k largest pass.

    Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification for low
    bandwidth networks", ICDCS 2019, arXiv 1901.04359. The mean holds k entries however many ranks
    there are; each receives log2(P) messages. The authors merge along a tree and then broadcast; in a
    butterfly both ranks of a pair merge, which gives the same entries without the broadcast where P is
    a power of two.

    Parameters
    ----------
    density, per_segment, dense_below
        See `Sparsifier`.
    conserving : bool
        Entries that are not in the mean return to the residuals of those who sent them. Published is no
        more than that, and it loses gradient from four ranks on: what was dropped in one merge, while
        the same entry reached the mean by another way. By default the merging rank keeps that.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Which entries are in the mean is not exact: they are the largest of a sum of two at every merge.
    """

    about = About("Shi et al. 2019", "k values, k indices", "butterfly", "2 n")

    conserving: bool = True

    def new_memory(self, rank: Rank) -> Merging:
        return Merging(rank, conserving=self.conserving)

    def stand_in(self, state: Merging) -> Butterfly | None:
        return Butterfly(state.message, state.merge) if self.fixed else None

    def step(self, rank: Rank, state: Merging, gradient: Array, sparse: bool) -> Steps:
        device = rank.device
        state.prepare(self, rank)
        plan = state.plan
        finite = device.accumulate_select(
            gradient, state.residual, state.spare, plan, state.indices, state.values
        )
        if finite:
            device.pack(state.spare, plan, state.indices, state.values, state.message)
        rank.sent = plan.total + plan.dense_total
        messages = yield Butterfly(state.message, state.merge, self.fixed, finite)
        state.put_back(Message.parse(messages.buffer, plan.total, 0, None).indices)
        return state.finish(rank, messages, rank.size, sparse=sparse)
