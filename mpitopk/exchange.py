"""The exchange phase: a collective that a scheme has yielded, carried out over MPI."""

from __future__ import annotations

from mpitopk import costs
from mpitopk.butterfly import Combination, schedule
from mpitopk.collectives import Allgatherv, Allreduce, Butterfly, Collective
from mpitopk.errors import ConfigError
from mpitopk.metrics import Metrics
from mpitopk.participant import Participant
from mpitopk.trace import Trace
from mpitopk.transport import FAILED, Transport
from mpitopk.wire import Messages


class Exchange:
    """Carries out collectives for a participant, and counts and times them.

    How long the exchange waits for the slowest rank (a round of a butterfly, for the other one) is
    known from the times in the headers. An allreduce has none; while a timeline is kept, the latest
    time is exchanged before it.
    """

    def __init__(
        self, participant: Participant, transport: Transport, trace: Trace, metrics: Metrics
    ) -> None:
        self._participant = participant
        self._transport = transport
        self._trace = trace
        self._metrics = metrics
        self._range = trace.range("exchange")

    def __call__(self, request: Collective | None) -> object | None:
        """Return the result of a collective; None if some rank cannot go on with the step.

        A request of None announces that this rank cannot, where sizes are exchanged first.
        """
        me, transport = self._participant, self._transport
        with self._range as arrival:
            if request is None:
                transport.sizes(FAILED)
                return None
            nbytes = request.nbytes
            if request.fixed and nbytes > 0:
                sizes = request.sizes or [nbytes] * transport.size
            else:
                sizes = transport.sizes(FAILED if me.failure else nbytes)
                if FAILED in sizes:
                    return None
            if isinstance(request, Allgatherv | Allreduce):
                me.sign(request, arrival)
            if isinstance(request, Allgatherv):
                messages = transport.allgatherv(request.message, sizes)
                self._trace.exchanged(arrival, messages.latest)
                self._metrics.bytes += messages.buffer.size - nbytes
            else:
                if len(set(sizes)) > 1:
                    raise ConfigError(f"the ranks exchange {sizes} bytes: give all the same density")
                if isinstance(request, Allreduce):
                    self._allreduce(request, arrival)
        if isinstance(request, Allgatherv):
            return messages if me.accepts(request, messages) else None
        if isinstance(request, Butterfly):
            return self._butterfly(request)
        return request.mean if me.rank.device.divide(request.mean, transport.size) else None

    def _butterfly(self, request: Butterfly) -> Messages | None:
        """Carry out the rounds; merges count as such, and each exchange waits for one other rank."""
        me, transport = self._participant, self._transport
        combination = Combination(me, request)
        for now in schedule(transport.rank, transport.size):
            if now.to is None and now.source is None:
                continue
            with self._range as arrival:
                combination.sign(arrival)
                received = transport.swap(combination.message, now.to, now.source)
                if received is not None:
                    self._trace.exchanged(arrival, received.latest)
                    self._metrics.bytes += request.nbytes
            if received is not None:
                combination.receive(received, now)
        return combination.result()

    def _allreduce(self, request: Allreduce, arrival: int) -> None:
        slowest = None if self._trace.events is None else self._transport.latest(arrival)
        self._transport.allreduce(request.values, request.mean)
        if slowest is not None:
            self._trace.exchanged(arrival, slowest)
        self._metrics.bytes += costs.allreduce_bytes(request.nbytes, self._transport.size)
