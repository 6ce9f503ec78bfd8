"""Many ranks in one process, in lockstep: the second driver of the schemes.

For tests, and for studies at sizes that no machine at hand has. Steps, states and errors are those
of the MPI driver; time is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpitopk import costs, state
from mpitopk.agreement import Report, verdict
from mpitopk.butterfly import Combination, schedule
from mpitopk.collectives import Allgatherv, Allreduce, Butterfly, Collective
from mpitopk.costs import Network
from mpitopk.device import open_device
from mpitopk.device.base import Device
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.layout import Layout
from mpitopk.participant import Participant
from mpitopk.schemes.base import Rank, Scheme, Sparse
from mpitopk.typing import Array
from mpitopk.wire import Messages


class Simulation:
    """`size` ranks that exchange gradients within this process.

    Parameters
    ----------
    size : int
        Number of ranks.
    layout, scheme, device, nonfinite
        As for `Runtime`.
    network : Network, optional
        What `clock` is modelled on: by default 20 us and 1.25 GB/s (10 Gbit/s Ethernet).

    Attributes
    ----------
    bytes : int
        Received by rank 0 so far.
    clock : float
        Modelled seconds of communication so far; computing takes no time.
    skipped : int
        Steps skipped because of NaN or Inf.

    Examples
    --------
    >>> import numpy as np
    >>> from mpitopk import Layout, Simulation, TopK
    >>> simulation = Simulation(3, Layout({"w": 4}), TopK(density=0.25))
    >>> simulation.allreduce(np.eye(3, 4, dtype=np.float32)).tolist()
    [0.3333333432674408, 0.3333333432674408, 0.3333333432674408, 0.0]
    """

    def __init__(
        self,
        size: int,
        layout: Layout,
        scheme: Scheme,
        *,
        device: str = "auto",
        nonfinite: str = "raise",
        network: Network | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"size is {size!r}: give a number of ranks from 1")
        self.layout = layout
        self.network = network or Network()
        self.bytes = 0
        self.clock = 0.0
        self.skipped = 0
        self.participants = [
            Participant(Rank(p, size, layout, open_device(device, 1)), scheme, nonfinite) for p in range(size)
        ]

    @property
    def residuals(self) -> list[dict[str, Array]]:
        """What each rank keeps, by name: flat arrays, not copied."""
        return [participant.state.saved for participant in self.participants]

    def allreduce(self, gradients: Sequence[object] | Array, sparse: bool = False) -> Any:
        """Take one step with the gradients of all ranks; return the mean, as `Runtime.allreduce`.

        Raises
        ------
        ExchangeError
            Also if the ranks do not all get the same bits.
        """
        if len(gradients) != len(self.participants):
            raise ConfigError(f"{len(gradients)} gradients for {len(self.participants)} ranks")
        pairs = zip(self.participants, gradients, strict=True)
        requests = [participant.begin(gradient, sparse) for participant, gradient in pairs]
        while True:
            results = self._exchange(requests)
            if results is None:
                return self._end_together(sparse)
            pairs = zip(self.participants, results, strict=True)
            requests = [participant.resume(result) for participant, result in pairs]
            if not any(requests):
                return self._same([participant.result for participant in self.participants])

    def _end_together(self, sparse: bool) -> Array | Sparse:
        reports: list[Report | None] = [participant.report() for participant in self.participants]
        for participant in self.participants:
            participant.abandon()
        error = verdict(reports, self.participants[0].nonfinite)
        if error is not None:
            raise error
        self.skipped += 1
        return self.participants[0].skipped(sparse)

    def _exchange(self, requests: list[Collective | None]) -> list[Any] | None:
        if None in requests:
            return None
        if all(isinstance(request, Butterfly) for request in requests):
            return self._butterfly(requests)  # type: ignore[arg-type]
        for participant, request in zip(self.participants, requests, strict=True):
            participant.sign(request, 0)  # type: ignore[arg-type]
        if all(isinstance(request, Allgatherv) for request in requests):
            return self._allgatherv(requests)  # type: ignore[arg-type]
        return self._allreduce(requests)  # type: ignore[arg-type]

    def _allgatherv(self, requests: list[Allgatherv]) -> list[Messages] | None:
        sizes = [request.message.buffer.size for request in requests]
        if requests[0].fixed and sizes != (requests[0].sizes or sizes[:1] * len(sizes)):
            raise ExchangeError(f"messages of {sizes} bytes were said to be of one size")
        starts = list(accumulate(sizes, initial=0))[:-1]
        pairs = zip(self.participants, requests, strict=True)
        sent = [_staged(p.rank.device, r.message.buffer, r.message.head) for p, r in pairs]
        messages = Messages(np.concatenate(sent), starts, sizes)
        self.bytes += costs.allgatherv_bytes(sizes, 0)
        self.clock += self.network.allgatherv(sizes)
        pairs = zip(self.participants, requests, strict=True)
        fine = all(participant.accepts(request, messages) for participant, request in pairs)
        if not fine:
            return None
        devices = [participant.rank.device for participant in self.participants]
        buffers = [device.unstaged(messages.buffer) for device in devices]
        return [Messages(buffer, starts, sizes, messages.words) for buffer in buffers]

    def _butterfly(self, requests: list[Butterfly]) -> list[Messages] | None:
        """Carry out the rounds; what is sent in one is as it was before all merges of that round."""
        ranks, nbytes = len(requests), requests[0].nbytes
        devices = [participant.rank.device for participant in self.participants]
        held = [Combination(p, r) for p, r in zip(self.participants, requests, strict=True)]
        for now in zip(*(schedule(rank, ranks) for rank in range(ranks)), strict=True):
            for combination in held:
                combination.sign(0)
            messages = [combination.message for combination in held]
            pairs = zip(devices, messages, strict=True)
            sent = [np.array(_staged(device, m.buffer, m.head)) for device, m in pairs]
            for device, combination, its in zip(devices, held, now, strict=True):
                if its.source is not None:
                    there = Messages(sent[its.source], [0], [nbytes])
                    here = Messages(device.unstaged(there.buffer), [0], [nbytes], there.words)
                    combination.receive(here, its)
        self.bytes += costs.butterfly_bytes(nbytes, ranks, 0)
        self.clock += self.network.butterfly(nbytes, ranks)
        results = [combination.result() for combination in held]
        return None if None in results else results  # type: ignore[return-value]

    def _allreduce(self, requests: list[Allreduce]) -> list[Array] | None:
        devices = [participant.rank.device for participant in self.participants]
        total = np.array(_staged(devices[0], requests[0].values))
        with np.errstate(over="ignore", invalid="ignore"):
            for device, request in zip(devices[1:], requests[1:], strict=True):
                total += _staged(device, request.values)
        self.bytes += costs.allreduce_bytes(total.nbytes, len(requests))
        self.clock += self.network.allreduce(total.nbytes, len(requests))
        pairs = zip(devices, requests, strict=True)
        means = [device.unstaged(total, request.mean) for device, request in pairs]
        finite = [device.divide(mean, len(requests)) for device, mean in zip(devices, means, strict=True)]
        return means if all(finite) else None

    def _same(self, results: list[Any]) -> Any:
        device = self.participants[0].rank.device
        every = [result if isinstance(result, Sparse) else [result] for result in results]
        bits = [[device.mirror(array, "mean").view(np.uint8) for array in arrays] for arrays in every]
        for rank, theirs in enumerate(bits):
            if not all(map(np.array_equal, bits[0], theirs)):
                raise ExchangeError(f"rank {rank} got another mean than rank 0")
        return results[0]

    def state_dicts(self) -> list[dict[str, Array]]:
        """Return the states of all ranks."""
        return [state.save(participant) for participant in self.participants]

    def load_state_dicts(self, states: Sequence[Mapping[str, Array]]) -> None:
        """Continue from saved states; state q goes to rank q modulo the number of ranks."""
        ranks = len(self.participants)
        given = [states[p::ranks] for p in range(ranks)]
        pairs = list(zip(self.participants, given, strict=True))
        first = state.agree([state.read(participant, theirs) for participant, theirs in pairs])
        for participant, theirs in pairs:
            state.apply(participant, theirs, first)


def _staged(device: Device, x: Array, head: memoryview | None = None) -> Array:
    staged = device.staged(x, head)
    device.settle()
    return staged
