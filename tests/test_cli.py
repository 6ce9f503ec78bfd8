"""`python -m mpitopk`: what it prints is there, complete and readable by machines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpitopk import SCHEMES

MPIEXEC = next(
    path for path in (str(Path(sys.executable).parent / "mpiexec"), shutil.which("mpiexec")) if path
)

ELSEWHERE = Path(__file__).parent  # outside of the sources, whose folder would be imported


def cli(*arguments: str, ranks: int = 0) -> str:
    launch = [MPIEXEC, "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [*launch, sys.executable, "-m", "mpitopk", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ELSEWHERE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bench(*arguments: str, ranks: int = 0) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = json.loads(
        cli("bench", *arguments, "--json", "--repeats", "2", ranks=ranks)
    )
    return tables


def test_info_has_a_verdict_for_each_item() -> None:
    lines = cli("info").splitlines()
    names = ["mpitopk", "python", "numpy", "mpi4py", "MPI library", "launcher", "CUDA-aware", "host kernels"]
    for name in [*names, "processors", "cupy", "nvtx"]:
        (line,) = [line for line in lines if line.startswith(name)]
        assert len(line.split(maxsplit=2)) > 1


def test_info_does_not_initialise_mpi() -> None:
    code = (
        "from mpitopk import info; info.show(); from mpi4py import MPI; "
        "assert not MPI.Is_initialized(), 'MPI was initialised'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ELSEWHERE
    )
    assert done.returncode == 0, done.stderr


def test_info_says_what_to_do_without_an_mpi_library() -> None:
    code = "import sys; sys.modules['mpi4py.MPI'] = None; from mpitopk import info; info.show()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ELSEWHERE
    )
    assert done.returncode == 0, done.stderr
    assert "pip install mpich" in done.stdout


def test_bench_select() -> None:
    pytest.importorskip("mpitopk.device._native")
    (table,) = bench("select", "--size", "20000", "--density", "0.01", "--threads", "1")
    names = {"feedback + select, warm", "feedback + select, cold", "select, warm", "numpy abs + argpartition"}
    assert names | {"std::nth_element"} <= set(table["median_seconds"])
    for name, ratios in table["ratios"].items():
        for column, ratio in ratios.items():
            assert ratio > 0, (name, column)


def test_bench_quantize() -> None:
    pytest.importorskip("mpitopk.device._native")
    (table,) = bench("quantize", "--size", "20000", "--threads", "1")
    assert len(table["ratios"]) == 11
    assert "QSGD 4 bits, buckets of 512, max: quantize" in table["ratios"]


def test_bench_exchange() -> None:
    for table in bench("exchange", "--kib", "1", "64", ranks=2):
        assert set(table["median_seconds"]) == {"MPI Allgatherv", "ours"}


def test_bench_step() -> None:
    small, _ = bench("step", "--size", "1000", "20000", ranks=2)
    assert {"bare Allreduce", "dense", "topk", "randomk"} <= set(small["ratios"])


def test_bench_step_of_every_scheme() -> None:
    (table,) = bench("step", "--scheme", "all", "--size", "5000")
    assert set(SCHEMES) <= set(table["ratios"])
    kept = {name: table["ratios"][name]["/ memory"] for name in ("dense", "topk", "dgc")}
    floor = table["median_seconds"]["a += b"] / 3
    for (name, ratio), arrays in zip(kept.items(), (2, 4, 6), strict=True):
        assert ratio == pytest.approx(table["median_seconds"][name] / (arrays * floor))


def test_tables_are_readable() -> None:
    text = cli("bench", "step", "--size", "1000", "--repeats", "1")
    assert "bare Allreduce" in text
    assert "1.00x" in text


def test_a_misspelt_benchmark_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpitopk", "bench", "selekt"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ELSEWHERE,
    )
    assert done.returncode == 2
    assert "select" in done.stderr


def test_schemes_are_listed_with_their_options() -> None:
    heading, *rows = cli("schemes").splitlines()
    assert heading.split()[:3] == ["name", "paper", "sends"]
    assert [row.split()[0] for row in rows] == list(SCHEMES)
    (dgc,) = [row for row in rows if row.startswith("dgc ")]
    assert "Lin et al. 2018" in dgc
    assert "momentum=0.9" in dgc
