"""The exchange phase alone: our allgatherv, header and checks included, against MPI's with the same bytes.

Start it with several ranks: mpiexec -n 4 python -m mpitopk bench exchange.
"""

from __future__ import annotations

import argparse

import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.collectives import Allgatherv
from mpitopk.device import open_device
from mpitopk.exchange import Exchange
from mpitopk.layout import Layout
from mpitopk.metrics import Metrics
from mpitopk.participant import Participant
from mpitopk.schemes import Rank, TopK
from mpitopk.trace import Trace
from mpitopk.transport import Transport

DENSITY = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--kib", type=int, nargs="+", default=[1, 64, 1024, 16384], help="KiB that each rank sends"
    )


def run(options: argparse.Namespace) -> list[Table]:
    """Return a table for each message size, on rank 0."""
    from mpi4py import MPI

    tables = [_compare(kib, options.repeats, MPI.COMM_WORLD) for kib in options.kib]
    return tables if MPI.COMM_WORLD.Get_rank() == 0 else []


def _compare(kib: int, repeats: int, comm: object) -> Table:
    from mpi4py import MPI

    assert isinstance(comm, MPI.Intracomm)
    transport = Transport(comm)
    layout = Layout({"all": max(2, int(kib * 1024 / 8 / DENSITY))})
    rank = Rank(transport.rank, transport.size, layout, open_device("auto", 1))
    participant = Participant(rank, TopK(DENSITY), "raise")
    exchange = Exchange(participant, transport, Trace(), Metrics())
    request = participant.begin(np.ones(layout.size, np.float32), False)
    assert isinstance(request, Allgatherv)
    message = request.message.buffer
    received = np.empty(message.size * comm.Get_size(), np.uint8)
    sizes = [message.size] * comm.Get_size()
    starts = [message.size * p for p in range(comm.Get_size())]
    table = Table(f"{message.size} bytes from each of {comm.Get_size()} ranks", {"/ MPI": "MPI Allgatherv"})
    table.seconds = interleave(
        {
            "MPI Allgatherv": lambda: comm.Allgatherv(message, [received, (sizes, starts)]),
            "ours": lambda: exchange(request),
        },
        repeats,
        before=comm.Barrier,
        slowest=lambda seconds: comm.allreduce(seconds, MPI.MAX),
    )
    participant.abandon()
    transport.free()
    return table
