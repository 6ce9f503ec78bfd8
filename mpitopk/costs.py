"""What an exchange costs: bytes on a rank's link, and the alpha-beta model of its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpitopk.butterfly import schedule


def allgatherv_bytes(sizes: Sequence[int], rank: int) -> int:
    """Return what a rank receives: the messages of all others. A ring makes it send about as much."""
    return sum(sizes) - sizes[rank]


def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """Return what a rank receives, and sends, in a ring allreduce of `nbytes`."""
    return 2 * nbytes * (ranks - 1) // ranks


def butterfly_bytes(nbytes: int, ranks: int, rank: int) -> int:
    """Return what a rank receives in a butterfly of messages of `nbytes`."""
    return nbytes * sum(r.source is not None for r in schedule(rank, ranks))


def break_even(ranks: int, value_bytes: int, dense_bytes: int = 4) -> float:
    """Return the density at which a sparse allgatherv moves as much as a dense allreduce.

    For (ranks - 1) density n (value_bytes + 4) = 2 (ranks - 1) / ranks n dense_bytes.
    """
    return 2 * dense_bytes / (ranks * (value_bytes + 4))


@dataclass(frozen=True)
class Network:
    """A network in the alpha-beta model: a message of m bytes takes `latency + m / bandwidth`.

    Attributes
    ----------
    latency : float
        Seconds per message (alpha).
    bandwidth : float
        Bytes per second and rank (1 / beta).
    """

    latency: float = 20e-6
    bandwidth: float = 1.25e9

    def allgatherv(self, sizes: Sequence[int]) -> float:
        """Return the seconds of a ring: P - 1 messages, the largest of each round on the way."""
        if len(sizes) == 1:
            return 0.0
        return (len(sizes) - 1) * self.latency + (sum(sizes) - min(sizes)) / self.bandwidth

    def allreduce(self, nbytes: int, ranks: int) -> float:
        """Return the seconds of Rabenseifner's algorithm."""
        rounds = 2 * math.ceil(math.log2(ranks))
        return rounds * self.latency + allreduce_bytes(nbytes, ranks) / self.bandwidth

    def butterfly(self, nbytes: int, ranks: int) -> float:
        """Return the seconds of all rounds, one after the other."""
        return len(schedule(0, ranks)) * (self.latency + nbytes / self.bandwidth)
