"""Every layer sends as much as can be exchanged while the next one is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.collectives import Allgatherv, Allreduce
from mpitopk.costs import Network
from mpitopk.errors import ConfigError, nearest
from mpitopk.layerwise import hidden_counts
from mpitopk.plan import Plan, plan_groups
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.sparsifier import Memory, Planned
from mpitopk.wire import Message, Messages, message_bytes

if TYPE_CHECKING:
    from mpitopk.layout import Layout
    from mpitopk.typing import Array


class Layered(Memory):
    """Error feedback, and room to exchange the dense segments apart from the entries of the others.

    `apart` says whether they are: by an allreduce, if that is quicker than to send them with the entries.
    """

    def prepare(self, scheme: LAGS, rank: Rank) -> None:  # type: ignore[override]
        """Make room for all that a step needs, so that nothing can fail between its collectives."""
        super().prepare(scheme, rank)
        plan, ranks, size = self.plan, rank.size, rank.layout.size
        self.entries = self.message
        nbytes = plan.dense_total * self.values.itemsize
        network = scheme.network
        self.apart = network.allreduce(nbytes, ranks) < (ranks - 1) * nbytes / network.bandwidth
        if self.apart:
            self.entries = Message.blank(
                self.message.buffer, plan.total, 0, str(self.values.dtype), rank.layout.digest
            )
            self.dense_mean = self.grown("dense", nbytes).view(self.values.dtype)
            union = min(size - plan.dense_total, ranks * plan.total)
            self.grown("joined", message_bytes(union, plan.dense_total, self.values.itemsize))

    @property
    def dense(self) -> Array:
        """Values of the dense segments on this rank: the end of its message."""
        return self.message.values[self.plan.total :]

    def joined(self, rank: Rank, messages: Messages) -> Message:
        """Return one message with the means of both exchanges."""
        layout, dense = rank.layout, self.plan.dense_total
        indices, values = rank.device.merge_sparse(
            messages, self.plan.dense[:0], rank.size, layout.size, layout.accumulator
        )
        count, itemsize = indices.size, self.values.itemsize
        room = self.grown("joined", message_bytes(count, dense, itemsize))
        message = Message.blank(room, count, dense, layout.accumulator, layout.digest)
        message.indices[:] = indices
        message.values[:count] = values
        message.values[count:] = self.dense_mean
        return message


@dataclass(frozen=True)
class LAGS(Planned):
    """Send of each segment as many of the largest entries as its exchange has time for.

    Shi et al., "Layer-wise adaptive gradient sparsification for distributed deep learning with convergence
    guarantees", ECAI 2020, arXiv 1911.08727: TopK for every layer, which is compressed only as far as its
    exchange must be to hide behind the backward pass of the layer before it. How much that is follows from
    times that are measured once and a model of the network (`mpitopk.layerwise`); `counts` shows it. It
    never changes in a run. Here one exchange after the backward pass carries all segments.

    Parameters
    ----------
    backward_seconds : mapping of str to float
        How long the backward pass takes for each segment: `mpitopk.agreed_seconds` makes the ranks agree
        on what they have measured. 0 where the gradient comes together with that of the segment before,
        as a bias with its weight. All 0: nothing is hidden, and every segment is compressed `cap` times.
    latency, bandwidth : float
        Of the network, in seconds per message and bytes per second (`costs.Network`).
    cap : float
        How many times a segment may be compressed at most, from 1.
    select_seconds : float
        Seconds that an entry takes to be accumulated and selected from: a part of a nanosecond for one
        thread of a host (`mpitopk bench select`).

    Raises
    ------
    ConfigError
        If an option is out of range; by the runtime, on all ranks, if a segment is missing or unknown.

    Notes
    -----
    Segments of which about 1 / P or more would be sent are sent dense, by an allreduce of their own where
    that is quicker: so is everything on a single rank.
    """

    about = About(
        "Shi et al. 2020",
        "k values, k indices of each segment",
        "allgatherv, allreduce",
        "2 n; 3 for each sent dense",
    )

    backward_seconds: Mapping[str, float]
    latency: float = Network.latency
    bandwidth: float = Network.bandwidth
    cap: float = 1000
    select_seconds: float = 5e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        times = self.backward_seconds
        if not isinstance(times, Mapping):
            raise ConfigError(f"backward_seconds is {times!r}: give a mapping of segments to seconds")
        given = {f"backward_seconds of {name!r}": seconds for name, seconds in times.items()}
        given |= {"latency": self.latency, "select_seconds": self.select_seconds}
        for option, value in given.items():
            if not _number(value) or value < 0:
                raise ConfigError(f"{option} is {value!r}: give seconds, from 0")
        if not _number(self.bandwidth) or self.bandwidth <= 0:
            raise ConfigError(f"bandwidth is {self.bandwidth!r}: give bytes per second, above 0")
        if not _number(self.cap) or self.cap < 1:
            raise ConfigError(f"cap is {self.cap!r}: give a number from 1")
        pairs = sorted((str(name), float(seconds)) for name, seconds in times.items())
        object.__setattr__(self, "backward_seconds", dict(pairs))

    @property
    def network(self) -> Network:
        """The network that the entries are counted for."""
        return Network(self.latency, self.bandwidth)

    def counts(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Return how many entries of each segment are sent; all of them: it is sent dense.

        Raises `ConfigError` if the times are those of other segments.
        """
        sizes = {s.name: s.size for s in layout}
        for name in self.backward_seconds:
            if name not in sizes:
                raise ConfigError(
                    f"backward_seconds has {name!r}, which is no segment: {nearest(name, sizes)}"
                )
        for name in sizes:
            if name not in self.backward_seconds:
                raise ConfigError(
                    f"backward_seconds lacks segment {name!r}: give 0 if it takes no time of its own"
                )
        counts = hidden_counts(
            list(sizes.values()),
            [self.backward_seconds[name] for name in sizes],
            ranks,
            self.network,
            cap=self.cap,
            value_bytes=np.dtype(layout.accumulator).itemsize,
            select_seconds=self.select_seconds,
        )
        return dict(zip(sizes, counts, strict=True))

    def plan(self, rank: Rank) -> Plan:
        counts = self.counts(rank.layout, rank.size)
        return plan_groups(rank.layout, [([s], counts[s.name]) for s in rank.layout])

    def new_memory(self, rank: Rank) -> Layered:
        return Layered(rank)

    def stand_in(self, state: Layered) -> Allgatherv:
        return Allgatherv(state.entries)

    def step(self, rank: Rank, state: Layered, gradient: Array, sparse: bool) -> Steps:
        device, plan = rank.device, state.plan
        finite = device.accumulate_select(
            gradient, state.residual, state.spare, plan, state.indices, state.values
        )
        if finite:
            device.pack(state.spare, plan, state.indices, state.values, state.message)
        rank.sent = plan.total + plan.dense_total
        messages = yield Allgatherv(state.entries, finite=finite)
        if not state.apart:
            return state.finish(rank, messages, rank.size, sparse=sparse)
        yield Allreduce(state.dense, state.dense_mean)
        return state.finish(rank, state.joined(rank, messages).alone, 1, sparse=sparse)


def _number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)
