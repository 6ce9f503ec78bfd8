"""The package as users get it: built without a compiler it lacks the kernels, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import mpitopk, numpy as np
from mpitopk.device import WHY_NOT_COMPILED, open_device
assert mpitopk.__file__.startswith({where!r}), mpitopk.__file__
assert WHY_NOT_COMPILED
assert open_device("auto", 1).name == "numpy"
try:
    open_device("host", 1)
except mpitopk.MpiTopkError as error:
    assert "compiler" in str(error)
else:
    raise AssertionError("there are no kernels to open")
simulation = mpitopk.Simulation(2, mpitopk.Layout({{"w": 8}}), mpitopk.TopK(density=0.25))
print(simulation.allreduce(np.eye(2, 8, dtype=np.float32)).tolist())
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(
        command, env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def probe(where: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(where)},
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_compiler_everything_runs_in_numpy(unpacked: Path) -> None:
    assert not list(unpacked.rglob("_native*.so"))
    assert probe(unpacked, PROBE.format(where=str(unpacked))).strip().startswith("[0.5, 0.5, 0.0")


def test_info_says_that_kernels_are_missing(unpacked: Path) -> None:
    lines = probe(
        unpacked, "import sys; sys.argv = ['mpitopk', 'info']; from mpitopk.__main__ import main; main()"
    )
    (kernels,) = [line for line in lines.splitlines() if line.startswith("host kernels")]
    assert "NumPy" in kernels
    assert "compiler" in kernels


def test_types_are_shipped(unpacked: Path) -> None:
    assert (unpacked / "mpitopk" / "py.typed").exists()
