"""How much of each layer's gradient can be exchanged while the backward pass goes on.

The idea is that of Shi et al., "Layer-wise adaptive gradient sparsification for distributed deep learning
with convergence guarantees", ECAI 2020, arXiv 1911.08727 (LAGS): compress each layer only as far as its
exchange has to be to hide behind the computation of the next one. How the numbers are found is ours after
it: no code of its authors does it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from mpitopk.agreement import together
from mpitopk.costs import Network, break_even
from mpitopk.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

INDEX_BYTES = 4


def hidden_counts(
    sizes: Sequence[int],
    seconds: Sequence[float],
    ranks: int,
    network: Network,
    *,
    cap: float = 1000,
    value_bytes: int = 4,
    select_seconds: float = 0.0,
) -> list[int]:
    """Return how many entries each segment sends; all of them stands for a dense exchange.

    Backpropagation goes from the last segment to the first. While a layer is selected from and exchanged,
    the one before it is computed. The layer sends the most entries for which

        select_seconds * size + time of an allgather of (4 + value_bytes) * count <= seconds of that one,

    and no fewer than one in `cap`, where that cannot be hidden, as nothing hides the first layer. From
    where an allreduce moves less (`costs.break_even`) a segment is sent dense.

    Parameters
    ----------
    sizes : sequence of int
        Entries of each segment, in the order of the layout.
    seconds : sequence of float
        How long the backward pass takes for each segment; 0 where its gradient comes together with that
        of the segment before it, as a bias with its weight: the two are one layer, compressed alike.
    ranks : int
        On a single one there is nothing to hide, and everything is sent.
    network : Network
    cap : float
        How many times the gradient may be compressed at most (c_u of the paper).
    value_bytes : int
        Bytes of a value; an index has 4.
    select_seconds : float
        Seconds that an entry takes to be accumulated and selected from.

    Examples
    --------
    >>> network = Network(latency=0, bandwidth=8e6)  # an entry, with its index, in a microsecond
    >>> hidden_counts([5000, 5000], [1e-3, 1e-3], 3, network, cap=100)
    [50, 500]
    """
    if ranks == 1:
        return list(sizes)
    entry_bytes = INDEX_BYTES + value_bytes
    dense_from = break_even(ranks, value_bytes, value_bytes)
    counts: list[int] = []
    meanwhile = 0.0
    for layer in _layers(seconds):
        size = sum(sizes[i] for i in layer)
        most = bisect_right(
            range(size + 1),
            meanwhile - select_seconds * size,
            key=lambda count: network.allgatherv([count * entry_bytes] * ranks),
        )
        for n in (sizes[i] for i in layer):
            count = max(ceil(n / cap), (most - 1) * n // max(1, size))
            counts.append(count if count < dense_from * n else n)
        meanwhile = seconds[layer[0]]
    return counts


def _layers(seconds: Sequence[float]) -> list[list[int]]:
    layers: list[list[int]] = []
    for i, own in enumerate(seconds):
        if own > 0 or not layers:
            layers.append([])
        layers[-1].append(i)
    return layers


def overlap_bound(forward: float, backward: float, exchange: float) -> float:
    """Return how many times as fast a step can become by exchanging during the backward pass.

    Of the seconds forward + backward + exchange at most the shorter of the last two can be hidden.

    Examples
    --------
    >>> overlap_bound(1.0, 3.0, 4.0)
    1.6
    """
    hidden, longer = sorted((backward, exchange))
    return 1 + hidden / (forward + longer) if hidden else 1.0


def agreed_seconds(comm: MPI.Intracomm, samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return, for each segment, the median of a rank's samples: that of the slowest rank (collective).

    Ranks measure different times, and must compress alike.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    samples : mapping of str to sequence of float
        The seconds that the backward pass took for each segment on this rank, in each of some steps.

    Raises
    ------
    ConfigError
        On all ranks, if one has no samples of a segment, or other segments than rank 0.
    """

    def medians() -> dict[str, float]:
        for name, measured in samples.items():
            if len(measured) == 0:
                raise ConfigError(f"there are no samples of {name!r}: measure some steps first")
        return {name: float(median(measured)) for name, measured in samples.items()}

    every = together(comm.allgather, comm.Get_rank(), medians, lambda mine: mine).every
    for rank, theirs in enumerate(every):
        if theirs.keys() != every[0].keys():
            raise ConfigError(
                f"rank {rank} has measured {', '.join(theirs)}, rank 0 {', '.join(every[0])}: "
                "give the samples of the same segments on all"
            )
    return {name: max(theirs[name] for theirs in every) for name in every[0]}
