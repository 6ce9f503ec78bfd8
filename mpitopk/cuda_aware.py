"""Whether MPI is given memory of the GPU, or messages go through pinned host memory.

What an MPI library says of itself is only a hint: it may have been built for GPUs and lack a driver, or
move device memory in some calls and crash in others. So the calls that are used are tried, first in a
process of their own, where the library may crash; then both ways are timed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpitopk.agreement import together
from mpitopk.collectives import Allgatherv, Allreduce, Collective
from mpitopk.errors import DeviceError, nearest
from mpitopk.transport import CUDA_AWARE, Transport

if TYPE_CHECKING:
    from mpitopk.device.gpu_memory import GpuMemoryDevice

CHOICES = ("auto", "0", "1")
LARGE = 1 << 20
TRIAL = "import sys; from mpitopk import cuda_aware; sys.exit(cuda_aware.try_alone(int(sys.argv[1])))"
TRIAL_SECONDS = 120
LAUNCHERS = ("PMI_", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER", "OMPI_COMM_", "HYDI_", "HYDRA_")
"""What tells a process that it is one of several ranks."""
TURNS = 7


class Route(NamedTuple):
    """How messages travel, and why so."""

    direct: bool
    reason: str

    def __str__(self) -> str:
        return f"messages in {'memory of the GPU' if self.direct else 'pinned host memory'} ({self.reason})"


def choose(transport: Transport, device: GpuMemoryDevice, request: Collective | None) -> None:
    """Decide how messages travel, in the same way on all ranks, and let them (collective).

    Parameters
    ----------
    request : Collective, optional
        What a step exchanges, to be timed; without it, sizes vary, and MPI gets memory of the GPU
        wherever that works.

    Raises
    ------
    DeviceError, ExchangeError
        On all ranks, if the environment asks for memory of the GPU and MPI does not move it, or if a rank
        has no memory for what it sends.
    """
    asked = os.environ.get(CUDA_AWARE, "auto")
    if asked not in CHOICES:
        raise DeviceError(f"{CUDA_AWARE} is {asked!r}: {nearest(asked, CHOICES)}")
    route = Route(False, f"{CUDA_AWARE} is 0")
    if asked == "auto":
        says, where = hint()
        why_not = "" if says else f"by {where}, the MPI library is not CUDA-aware"
        if says and transport.local_rank == 0:
            why_not = trial(transport.local_rank)
        route = _agreed(transport, Route(True, where), why_not)
    if asked == "1" or route.direct:
        route = _agreed(transport, Route(True, "tried, and right"), probe(transport, device))
        if asked == "1" and not route.direct:
            raise DeviceError(f"{CUDA_AWARE} is 1, but {route.reason}: let it be auto, or 0")
    if asked == "auto" and route.direct and request is not None:
        route = _faster(transport, device, request)
    _use(transport, device, route.direct)

    def make_room() -> str:
        if request is not None:
            device.staged(request.sent)
            device.settle()  # or the first header might be written before, and lost
        return device.place

    places = together(transport.gather_objects, transport.rank, make_room, lambda place: place).every
    if transport.rank == 0:
        logging.getLogger("mpitopk").info("ranks on %s; %s", ", ".join(places), route)


def _agreed(transport: Transport, route: Route, why_not: str) -> Route:
    """Return the route, or another if some rank has something against it."""
    reasons = transport.gather_objects(why_not)
    against = [f"on rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    return Route(False, against[0]) if against else route


def _use(transport: Transport, device: GpuMemoryDevice, direct: bool) -> None:
    device.use_direct(direct)
    transport.serve(device)


def hint() -> tuple[bool | None, str]:
    """Return whether the MPI library says that it is CUDA-aware (None: it does not), and by what it does."""
    from mpi4py import MPI

    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None and "cuda" in [kind.split(":")[0] for kind in kinds.split(",")]:
        return True, f"mpi_memory_alloc_kinds ({kinds})"
    path = loaded("libmpi")
    library = ctypes.CDLL(path) if path else None
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and what descends from it; 0 stands for CUDA
        answer = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0:  # type: ignore[union-attr]
            return bool(answer.value), "MPIX_GPU_query_support"
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support"  # type: ignore[union-attr]
    return None, "its own account (there is none)"


def loaded(name: str) -> str:
    """Return the path of a shared library that this process has loaded (Linux), by its file's name."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if Path(path).name.startswith(name)), "")


def trial(local_rank: int) -> str:
    """Probe one rank in a process of its own; return why MPI cannot be given memory of the GPU, if so."""
    alone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) or name.endswith("_PREFIX")
    }
    command = [sys.executable, "-c", TRIAL, str(local_rank)]
    try:
        child = subprocess.run(
            command, env=alone, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a trial in a process of its own did not end ({error})"
    if child.returncode == 0:
        return ""
    last = (child.stderr.strip().splitlines() or ["without a word"])[-1]
    return f"a trial in a process of its own ended with {child.returncode}: {last}"


def try_alone(local_rank: int) -> str | None:
    """Probe in this process, as its only rank; return what is wrong, if anything."""
    from mpi4py import MPI

    from mpitopk.device import open_device

    device = open_device("cuda", 1, local_rank)
    return probe(Transport(MPI.COMM_SELF), device) or None  # type: ignore[arg-type]


def probe(transport: Transport, device: GpuMemoryDevice) -> str:
    """Give MPI memory of the GPU in every call that is used; return what goes wrong, if anything does."""
    ranks, rank = transport.size, transport.rank
    every, large = range(ranks), min(LARGE, 16 * transport.limit)
    _use(transport, device, True)
    try:
        for turn, sizes in enumerate(
            (
                [64] * ranks,
                [large] * ranks,
                [large // 1000 * (q + 1) for q in every],
                [large * (q % 2) for q in every],
            )
        ):
            bytes_of = [_pattern(size, q, turn) for q, size in enumerate(sizes)]
            sent = device.staged(device.from_host(bytes_of[rank]))
            received = device.mirror(transport.gather_bytes(sent, sizes).buffer, "what was received")
            if not np.array_equal(received, np.concatenate(bytes_of)):
                return f"MPI gathered wrong bytes in memory of the GPU (sizes of {sizes[0]}, {sizes[-1]})"
        for size in (64, large):
            to, source = _neighbours(transport)
            sent = device.staged(device.from_host(_pattern(size, rank, size)))
            received = device.mirror(transport.swap_bytes(sent, to, source).buffer, "what was received")
            if not np.array_equal(received, _pattern(size, source, size)):
                return f"MPI sent wrong bytes from memory of the GPU to another rank ({size} bytes)"
        for size in (3, large // 4):
            x = device.from_host(np.full(size, rank + 1, np.float32))
            transport.allreduce(x, x)
            if not np.array_equal(
                device.mirror(x, "sum"), np.full(size, ranks * (ranks + 1) / 2, np.float32)
            ):
                return f"MPI added up wrongly in memory of the GPU ({size} numbers)"
    except Exception as error:  # MPI's own, or CuPy's
        return f"{type(error).__name__}: {error}"
    return ""


def _neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def _pattern(size: int, rank: int, turn: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return ((np.arange(size) + 31 * rank + 7 * turn) % 251).astype(np.uint8)


def _faster(transport: Transport, device: GpuMemoryDevice, request: Collective) -> Route:
    """Return the quicker of both ways for what a step exchanges."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for direct in (True, False, True, False):
        _use(transport, device, direct)
        for turn in range(TURNS):
            start = perf_counter()
            if isinstance(request, Allgatherv):
                transport.allgatherv(request.message, request.sizes or [request.nbytes] * transport.size)
            elif isinstance(request, Allreduce):
                transport.allreduce(request.values, request.mean)
            else:
                transport.swap(request.message, *_neighbours(transport))
            device.settle()
            if turn > 0:
                taken[direct].append(perf_counter() - start)
    medians = transport.gather_objects((median(taken[True]), median(taken[False])))
    there, staged = (max(times) for times in zip(*medians, strict=True))
    ratio = there / staged
    compared = f"{max(ratio, 1 / ratio):.1f} times as fast as the other way for {request.nbytes} bytes a rank"
    return Route(ratio <= 1, compared)
