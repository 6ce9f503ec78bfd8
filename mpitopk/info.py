"""What is installed here and whether it will do, found out without initialising MPI."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpitopk.cuda_aware import loaded
from mpitopk.device import WHY_NOT_COMPILED, why_no_gpu

QUERY = "from mpitopk.cuda_aware import hint; print(*hint())"
QUERY_SECONDS = 30


class Item(NamedTuple):
    """One line: a name, what was found, and what follows from it."""

    name: str
    found: str
    verdict: str


def items() -> Iterator[Item]:
    """Yield what there is to know, the most basic first."""
    yield Item("mpitopk", _version("mpitopk"), "ok")
    yield Item("python", f"{platform.python_version()} on {platform.machine()}", "ok")
    yield Item("numpy", _version("numpy"), "ok")
    yield from _mpi()
    yield _kernels()
    yield _processors()
    yield _cupy()
    yield _nvtx()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mpi() -> Iterator[Item]:
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        yield Item("mpi4py", _version("mpi4py"), f"no MPI library was found ({reason}): pip install mpich")
        return
    yield Item("mpi4py", _version("mpi4py"), "ok")
    library = MPI.Get_library_version().splitlines()[0].rstrip("\0 ,")
    yield Item("MPI library", library, f"ok: loaded from {loaded('libmpi') or 'within mpi4py'}")
    launcher = _launcher()
    remedy = "ok" if launcher else "none was found: start the ranks with your cluster's own, such as srun"
    yield Item("launcher", launcher or "", remedy)
    yield _cuda_aware()


def _launcher() -> str | None:
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _cuda_aware() -> Item:
    """Ask the library. It answers only after its initialisation, so a child process asks."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", QUERY], capture_output=True, text=True, timeout=QUERY_SECONDS
        )
        says, _, where = child.stdout.strip().partition(" ")
    except (OSError, subprocess.TimeoutExpired):
        says = where = ""
    found = {"True": f"yes, by {where}", "False": f"no, by {where}", "None": "it does not say"}
    verdict = "to be tried" if says == "True" else "memory of a GPU would go through that of the host"
    return Item("CUDA-aware", found.get(says, "MPI does not start here"), f"{verdict} (MPITOPK_CUDA_AWARE)")


def _kernels() -> Item:
    if WHY_NOT_COMPILED:
        return Item(
            "host kernels",
            "NumPy",
            f"slow ({WHY_NOT_COMPILED}): install a C++ compiler and build mpitopk again",
        )
    from mpitopk.device import _native

    return Item("host kernels", f"compiled, {_native.isas()[-1]}", "ok")


def _processors() -> Item:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Item("processors", f"{usable} usable of {os.cpu_count()}", "ok: shared out among a node's ranks")


def _cupy() -> Item:
    version = next((v for v in map(_version, ("cupy-cuda12x", "cupy-cuda13x", "cupy")) if v), "")
    if not version:
        return Item("cupy", "", "not installed: gradients live in host memory")
    why_not = why_no_gpu()
    return Item("cupy", version, f"no GPU: {why_not}" if why_not else "ok: a kernel ran; device='cuda'")


def _nvtx() -> Item:
    import nvtx

    verdict = "ok: ranges are recorded under a profiler" if nvtx.enabled() else "off: NVTX_DISABLE is set"
    return Item("nvtx", _version("nvtx"), verdict)


def show() -> None:
    """Print one line an item."""
    for item in items():
        print(f"{item.name:14}{item.found or '-':44}{item.verdict}")
