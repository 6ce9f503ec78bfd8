"""One suite for one process and for many: `mpirun -n 4 python -m pytest --with-mpi --only-mpi`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from mpitopk.device import WHY_NOT_COMPILED

AVAILABLE = ["numpy"] if WHY_NOT_COMPILED else ["numpy", "host"]
DEVICES = os.environ.get("MPITOPK_TEST_DEVICES", ",".join(AVAILABLE)).split(",")


if "cuda" in DEVICES and not os.environ.get("MPITOPK_TEST_GPU"):
    from devices import install_standin

    install_standin()

QUIET = pytest.StashKey[io.StringIO]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config.option, "with_mpi") or _installed("mpi-pytest"):
        raise pytest.UsageError("pip install pytest-mpi, without mpi-pytest, which has the same module")
    config.addinivalue_line("markers", "ranks64: the small set for 64 ranks")
    if _ranks(config) > 1:
        # Ranks that share a folder for temporary files would clear it under each other.
        folder = _comm().bcast(tempfile.mkdtemp(prefix="mpitopk-tests-") if _comm().rank == 0 else None)
        config.option.basetemp = f"{folder}/{_comm().rank}"
        config.add_cleanup(lambda: _remove(folder, config.option.basetemp))
        if _comm().rank > 0:
            config.stash[QUIET] = io.StringIO()


def _remove(folder: str, mine: str) -> None:
    shutil.rmtree(mine, ignore_errors=True)
    with contextlib.suppress(OSError):  # other ranks still have theirs
        os.rmdir(folder)


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let only rank 0 report."""
    if QUIET in session.config.stash:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw._file = session.config.stash[QUIET]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks that run different tests would wait for each other for ever."""
    if _ranks(session.config) > 1:
        names = "\n".join(item.nodeid for item in session.items)
        digests = _comm().allgather(hashlib.sha256(names.encode()).hexdigest())
        if len(set(digests)) > 1:
            pytest.exit("the ranks have collected different tests", returncode=3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End all ranks when a test fails on one: the others may wait in a collective."""
    if report.failed and "mpi4py.MPI" in sys.modules and _comm().size > 1:
        sys.__stderr__.write(f"\nrank {_comm().rank}: {report.nodeid}\n{report.longreprtext}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
        _comm().Abort(1)


def _comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _ranks(config: pytest.Config) -> int:
    return int(_comm().size) if config.getoption("with_mpi") or config.getoption("only_mpi") else 1


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A device that is there; one that is named by MPITOPK_TEST_DEVICES and missing is a failure."""
    return str(request.param)


@pytest.fixture
def comm() -> Iterator[Any]:
    """MPI's world, in step before and after each test."""
    _comm().Barrier()
    yield _comm()
    _comm().Barrier()
