"""Whole steps: the schemes against a bare allreduce, and against the bare collective of each scheme.

Start it with several ranks: mpiexec -n 4 python -m mpitopk bench step. On one machine the "network"
is memory, which no compression beats; what is to be read here is what the runtime itself costs.

With --scheme all, and on one rank, it is what the work of each scheme costs. "/ memory" compares it with
moving what it must at least: the gradient and what is kept from step to step are read, that and the mean are
written, as fast as `a += b` moves its three arrays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.layout import Layout
from mpitopk.plan import entries
from mpitopk.runtime import Runtime
from mpitopk.schemes import SCHEMES, Scheme, make_scheme
from mpitopk.wire import message_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", type=int, nargs="+", default=[1000, 1_000_000], help="entries")
    parser.add_argument("--density", type=float, default=0.01, help="k / size (default: 0.01)")
    parser.add_argument(
        "--scheme", nargs="+", choices=[*SCHEMES, "all"], default=["dense", "topk", "randomk"], metavar="NAME"
    )


def run(options: argparse.Namespace) -> list[Table]:
    """Return a table for each size, on rank 0."""
    from mpi4py import MPI

    tables = [_compare(size, options) for size in options.size]
    return tables if MPI.COMM_WORLD.Get_rank() == 0 else []


def _made(name: str, density: float) -> Scheme:
    needed = {"density": density, "backward_seconds": {"all": 0.0}}
    known = [field.name for field in fields(SCHEMES[name])]  # type: ignore[arg-type]
    return make_scheme(name, **{option: value for option, value in needed.items() if option in known})


def _arrays_moved(runtime: Runtime) -> int:
    """Return how many arrays of the gradient's length a step reads and writes at least."""
    kept = {name.split("/")[0] for name in runtime.state_dict() if name.endswith("/all")}
    return 2 + 2 * len(kept - {"shared"})


def _compare(size: int, options: argparse.Namespace) -> Table:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ranks = comm.Get_size()
    layout = Layout({"all": size})
    gradient = np.random.default_rng(comm.Get_rank()).standard_normal(size, dtype=np.float32)
    mean = np.empty_like(gradient)
    names = list(SCHEMES) if "all" in options.scheme else options.scheme
    runtimes = {name: Runtime(comm, layout, _made(name, options.density)) for name in names}
    sent = np.empty(message_bytes(entries(options.density, size), 0, gradient.itemsize), np.uint8)
    received = np.empty(sent.size * ranks, np.uint8)
    total = np.zeros_like(gradient)

    def bare() -> None:
        comm.Allreduce(gradient, mean)
        np.divide(mean, ranks, out=mean)

    contestants: dict[str, Callable[[], object]] = {
        "bare Allreduce": bare,
        "bare Allgather of TopK's bytes": lambda: comm.Allgather(sent, received),
        "a += b": lambda: np.add(total, gradient, out=total),
    }
    for name, runtime in runtimes.items():
        contestants[name] = lambda runtime=runtime: runtime.allreduce(gradient)  # type: ignore[misc]
    table = Table(
        f"{size} x float32, density {options.density}, {ranks} ranks",
        {
            "/ Allreduce": "bare Allreduce",
            "/ Allgather": "bare Allgather of TopK's bytes",
            "/ memory": "a += b",
        },
    )
    table.shares["/ memory"] = {name: _arrays_moved(runtime) / 3 for name, runtime in runtimes.items()}
    table.seconds = interleave(
        contestants,
        options.repeats,
        before=comm.Barrier,
        slowest=lambda seconds: comm.allreduce(seconds, MPI.MAX),
    )
    for runtime in runtimes.values():
        runtime.close()
    return table
