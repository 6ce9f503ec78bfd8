"""Whole steps: the schemes against a bare allreduce, and against the bare collective of each scheme.

Start it with several ranks: mpiexec -n 4 python -m mpitopk bench step. On one machine the "network"
is memory, which no compression beats; what is to be read here is what the runtime itself costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.layout import Layout
from mpitopk.runtime import Runtime
from mpitopk.schemes import Dense, RandomK, TopK


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", type=int, nargs="+", default=[1000, 1_000_000], help="entries")
    parser.add_argument("--density", type=float, default=0.01, help="k / size (default: 0.01)")


def run(options: argparse.Namespace) -> list[Table]:
    """Return a table for each size, on rank 0."""
    from mpi4py import MPI

    tables = [_compare(size, options.density, options.repeats) for size in options.size]
    return tables if MPI.COMM_WORLD.Get_rank() == 0 else []


def _compare(size: int, density: float, repeats: int) -> Table:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ranks = comm.Get_size()
    layout = Layout({"all": size})
    gradient = np.random.default_rng(comm.Get_rank()).standard_normal(size, dtype=np.float32)
    mean = np.empty_like(gradient)
    schemes = {"Dense": Dense(), "TopK": TopK(density), "RandomK": RandomK(density)}
    runtimes = {name: Runtime(comm, layout, scheme) for name, scheme in schemes.items()}
    runtimes["TopK"].allreduce(gradient)
    sent = np.empty(runtimes["TopK"].metrics.bytes // max(1, ranks - 1), np.uint8)
    received = np.empty(sent.size * ranks, np.uint8)

    def bare() -> None:
        comm.Allreduce(gradient, mean)
        np.divide(mean, ranks, out=mean)

    contestants: dict[str, Callable[[], object]] = {
        "bare Allreduce": bare,
        "bare Allgather of TopK's bytes": lambda: comm.Allgather(sent, received),
    }
    for name, runtime in runtimes.items():
        contestants[name] = lambda runtime=runtime: runtime.allreduce(gradient)  # type: ignore[misc]
    table = Table(
        f"{size} x float32, density {density}, {ranks} ranks",
        {"/ Allreduce": "bare Allreduce", "/ Allgather": "bare Allgather of TopK's bytes"},
    )
    table.seconds = interleave(
        contestants,
        repeats,
        before=comm.Barrier,
        slowest=lambda seconds: comm.allreduce(seconds, MPI.MAX),
    )
    for runtime in runtimes.values():
        runtime.close()
    return table
