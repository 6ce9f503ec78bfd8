"""The exchange phase: a collective that a scheme has yielded, carried out over MPI."""

from __future__ import annotations

from mpitopk import costs
from mpitopk.collectives import Allgatherv, Allreduce, Collective
from mpitopk.errors import ConfigError
from mpitopk.metrics import Metrics
from mpitopk.participant import Participant
from mpitopk.trace import Trace
from mpitopk.transport import FAILED, Transport
from mpitopk.wire import Messages


class Exchange:
    """Carries out collectives for a participant, and counts and times them.

    How long the exchange waits for the slowest rank is known from the times in the headers. An
    allreduce has none; while a timeline is kept, the latest time is exchanged before it.
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
        with self._range:
            arrival = self._trace.now()
            if request is None:
                transport.sizes(FAILED)
                return None
            me.sign(request, arrival)
            if request.fixed and request.nbytes > 0:
                sizes = [request.nbytes] * transport.size
            else:
                sizes = transport.sizes(FAILED if me.failure else request.nbytes)
            if FAILED in sizes:
                return None
            if isinstance(request, Allgatherv):
                messages = self._allgatherv(request, sizes, arrival)
            else:
                self._allreduce(request, sizes, arrival)
        if isinstance(request, Allgatherv):
            return messages if me.accepts(request, messages) else None
        return request.mean if me.rank.device.divide(request.mean, transport.size) else None

    def _allgatherv(self, request: Allgatherv, sizes: list[int], arrival: int) -> Messages:
        device = self._participant.rank.device
        messages = self._transport.allgatherv(request.message.on_host(device), sizes)
        self._trace.exchanged(arrival, messages.latest)
        self._metrics.bytes += costs.allgatherv_bytes(sizes, self._transport.rank)
        return messages.on(device)

    def _allreduce(self, request: Allreduce, sizes: list[int], arrival: int) -> None:
        if len(set(sizes)) > 1:
            raise ConfigError(f"the ranks average arrays of {sizes} bytes: give all the same density")
        slowest = None if self._trace.events is None else self._transport.latest(arrival)
        device = self._participant.rank.device
        sent = device.staged(request.values)
        total = request.mean if sent is request.values else sent
        self._transport.allreduce(sent, total)
        device.unstaged(total, request.mean)
        if slowest is not None:
            self._trace.exchanged(arrival, slowest)
        self._metrics.bytes += costs.allreduce_bytes(sizes[0], self._transport.size)
