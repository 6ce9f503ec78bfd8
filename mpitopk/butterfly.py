"""Messages merged two at a time, so that all ranks end with the same one: the rounds, and a rank's part.

With P = 2^m + x ranks, each of the last x hands its message to one of the first (r + 2^m to r), which
exchange and merge with the rank whose number differs in bit 0, 1, ... m - 1; the last x are then given
the result. This is recursive doubling, as in Thakur, Rabenseifner & Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005, section 4.5, with a merge in place of a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpitopk.agreement import Report, verdict
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.wire import Message, Messages, Status

if TYPE_CHECKING:
    from mpitopk.collectives import Butterfly
    from mpitopk.participant import Participant


class Round(NamedTuple):
    """What a rank does in a round."""

    to: int | None = None
    """The rank that it sends to."""
    source: int | None = None
    """The rank that it receives from."""
    merges: bool = False
    """Whether it merges what it receives; that is the result otherwise."""
    keeps: bool = False
    """Whether it is the one, of all that merge the same two messages, that keeps what is dropped."""


def schedule(rank: int, ranks: int) -> list[Round]:
    """Return the rounds of a rank; there are as many for each, so that some pass without it."""
    doublings = ranks.bit_length() - 1
    inner = 1 << doublings
    excess = ranks - inner
    other = rank + inner if rank < inner else rank - inner
    paired = rank < excess or rank >= inner
    rounds = []
    if excess:
        rounds.append(Round())
        if paired:
            rounds[-1] = Round(to=other) if rank >= inner else Round(source=other, merges=True, keeps=True)
    for bit in range(doublings):
        partner, lowest = rank ^ 1 << bit, rank % (2 << bit) == 0
        inside = Round(partner, partner, merges=True, keeps=lowest)
        rounds.append(inside if rank < inner else Round())
    if excess:
        rounds.append(Round())
        if paired:
            rounds[-1] = Round(source=other) if rank >= inner else Round(to=other)
    return rounds


class Combination:
    """What a rank holds, from round to round.

    The worst status of all that it has heard of goes along with what it sends: after the last round
    every rank knows whether all can go on, since all that merge the same two messages find the same.
    One that cannot goes on talking, and merges no more.

    Attributes
    ----------
    message : Message
        What this rank holds.
    """

    def __init__(self, me: Participant, request: Butterfly) -> None:
        self.message = request.message
        self._me = me
        self._merge = request.merge
        self._status = me.status(request)
        self._result: Messages | None = None
        self._error: Exception | None = None

    def sign(self, arrival: int) -> None:
        """Write the header of what is sent next."""
        self.message.sign(self._status, self._me.rank.step, arrival)

    def receive(self, messages: Messages, now: Round) -> None:
        """Take note of what has arrived in a round."""
        self._status = Status(max(self._status, messages.worst))
        if self._status is not Status.FINE:
            return
        try:
            self._check(messages, now)
        except Exception as error:
            self._me.failure, self._status = error, Status.FAILED
            return
        if not now.merges:
            self._result = messages
            return
        mine = self.message
        theirs = Message.parse(messages.buffer, mine.indices.size, mine.dense, str(mine.values.dtype))
        try:
            merged = self._merge(mine, theirs, now.keeps)
        except Exception as error:
            self._error, self._status = error, Status.LOST
            return
        if merged is None:
            self._status = Status.NONFINITE
        else:
            self.message = merged

    def _check(self, messages: Messages, now: Round) -> None:
        """Raise unless the message is of our step and form; its sender then finds the same of ours."""
        rank, mine, theirs = self._me.rank, self.message.indices.size, messages.counts[0]
        assert now.source is not None
        messages.all_fine(self.message, first=now.source)
        if theirs != mine:
            raise ConfigError(
                f"the message of rank {now.source} has {theirs} entries, that of rank {rank.id} {mine}: "
                "give all the same density"
            )

    def result(self) -> Messages | None:
        """Return what all ranks hold after the last round; None if some rank cannot go on.

        Raises what has gone wrong in a merge, here or elsewhere, of which not all ranks may have heard.
        """
        if self._error is not None:
            raise verdict([Report.of(self._me.rank.id, self._error)]) or AssertionError from self._error
        if self._status is Status.LOST:
            raise ExchangeError(
                "merging has failed on another rank, which says why; some ranks may have gone on: "
                "start again from a checkpoint"
            )
        if self._status is not Status.FINE:
            return None
        return self._result or self.message.alone
