"""The suite itself under MPI: a rank that fails, hangs or runs other tests ends all of them, soon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec") or "mpiexec"
START = """
import pytest
pytestmark = pytest.mark.mpi
"""


def suite(folder: Path, code: str, *options: str, ranks: int = 2, seconds: float = 60) -> tuple[int, str]:
    """Run tests under this suite's conftest; return the exit status and what was printed."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    (folder / "test_inner.py").write_text(START + code)
    python = [sys.executable, "-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", *options]
    command = [MPIEXEC, "-n", str(ranks), *python, "test_inner.py"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"MPITOPK_TEST_DEVICES": "numpy"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert time.monotonic() - began < seconds, done.stdout
    return done.returncode, done.stdout


def test_only_rank_0_reports(tmp_path: Path) -> None:
    status, text = suite(tmp_path, "def test_fine(comm): assert comm.size == 3", ranks=3)
    assert status == 0, text
    assert text.count("1 passed") == 1


def test_one_failing_rank_ends_the_others(tmp_path: Path) -> None:
    """They wait for it in a collective."""
    code = "def test_lost(comm):\n    assert comm.rank != 1, 'rank 1 has lost it'\n    comm.allgather(0)"
    status, text = suite(tmp_path, code)
    assert status != 0
    assert "rank 1: test_inner.py::test_lost" in text
    assert "rank 1 has lost it" in text


def test_a_rank_that_hangs_in_mpi_is_ended(tmp_path: Path) -> None:
    code = "def test_stuck(comm):\n    if comm.rank == 0: comm.recv(source=1)"
    options = ["-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true"]
    status, text = suite(tmp_path, code, *options)
    assert status != 0
    assert "Timeout" in text
    assert "test_stuck" in text


def test_ranks_that_collect_other_tests_do_not_start(tmp_path: Path) -> None:
    code = (
        "from mpi4py import MPI\n"
        "@pytest.mark.parametrize('x', range(2 + MPI.COMM_WORLD.rank))\n"
        "def test_some(comm, x): comm.Barrier()"
    )
    status, text = suite(tmp_path, code)
    assert status != 0
    assert "the ranks have collected different tests" in text


@pytest.mark.parametrize("name", ["cuda", "hots"])
def test_a_device_that_is_named_and_missing_is_a_failure(tmp_path: Path, name: str) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_inner.py").write_text(
        "from mpitopk.device import open_device\ndef test_open(device): open_device(device, 1)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_inner.py"],
        cwd=tmp_path,
        env=os.environ | {"MPITOPK_TEST_DEVICES": f"numpy,{name}", "MPITOPK_TEST_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
