"""profiling/nsys.py: the commands that it prints, and what ranks do with them, with a stand-in for nsys."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import MPIEXEC

NSYS = Path(__file__).parents[1] / "profiling" / "nsys.py"
RANKS = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK", "srun": "SLURM_PROCID"}
LAUNCH = {
    "openmpi": "mpirun --mca pml ob1 -x LD_LIBRARY_PATH --map-by :oversubscribe -n 4",
    "mpich": "mpiexec -n 4 -genv OMP_NUM_THREADS 1",
    "srun": "srun -n 64 -J test --mpi=pmix",
}
"""With values that are names of programs, or look like it."""
SHOW = 'import os; os.write(1, f\'rank {os.environ.get("WITHIN", "alone")}\\n\'.encode())'
"""In one piece, which no other rank's comes between."""
STANDIN = """#!/bin/sh
# Writes its arguments, and becomes the program that is to be profiled.
echo "$@" > "nsys-$$"
while [ "$1" != -o ]; do shift; done
shift 2
WITHIN=nsys exec "$@"
"""


def start(
    folder: Path, *arguments: str, path: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in RANKS.values()}
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**known, "PATH": path or os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def printed(folder: Path, *arguments: str) -> list[str]:
    done = start(folder, sys.executable, str(NSYS), *arguments)
    assert done.returncode == 0, done.stderr
    assert "nsys export --type sqlite" in done.stderr, "what to do afterwards"
    return shlex.split(done.stdout)


@pytest.fixture
def profiler(tmp_path: Path) -> str:
    """A PATH with the stand-in."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(STANDIN)
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("kind", RANKS)
def test_every_rank_has_a_report_of_its_own(tmp_path: Path, kind: str) -> None:
    launch, program = LAUNCH[kind].split(), [sys.executable, "train.py", "--steps", "3", "-n", "5"]
    command = printed(tmp_path, "--mpi", kind, "--", *launch, *program)
    assert command[: len(launch)] == launch
    assert command[-len(program) :] == program
    profile = command[len(launch) : -len(program)]
    assert profile[:2] == ["nsys", "profile"]
    assert "--trace=nvtx,mpi,cuda" in profile
    assert profile[-2:] == ["-o", f"rank%q{{{RANKS[kind]}}}"]
    implementations = [word for word in profile if word.startswith("--mpi-impl=")]
    assert implementations == [f"--mpi-impl={kind}"] or kind == "srun"
    assert len(implementations) == 1, "where srun does not say which MPI it is, mpi4py does"


def test_the_program_can_be_named(tmp_path: Path) -> None:
    command = printed(tmp_path, "--mpi", "srun", "--", "srun", "--comment", "test", "--", "unknown.sh", "x")
    assert command[:3] == ["srun", "--comment", "test"]
    assert command[-2:] == ["unknown.sh", "x"]


def test_the_launcher_says_which_mpi_it_is(tmp_path: Path) -> None:
    from mpi4py import MPI

    kind = "openmpi" if "Open MPI" in MPI.Get_library_version() else "mpich"
    command = printed(tmp_path, "--", MPIEXEC, "-n", "2", sys.executable, "train.py")
    assert f"rank%q{{{RANKS[kind]}}}" in command


def test_only_chosen_ranks_are_profiled(tmp_path: Path, profiler: str) -> None:
    """The command is carried out on real ranks, with the stand-in."""
    job = [MPIEXEC, "-n", "3", sys.executable, "-c", SHOW]
    arguments = ["--ranks", "0,2", "--output", "reports/r", "--run", "--", *job]
    done = start(tmp_path, sys.executable, str(NSYS), *arguments, path=profiler)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["rank", "nsys"] * 2 + ["rank", "alone"])
    calls = [path.read_text() for path in tmp_path.glob("nsys-*")]
    assert len(calls) == 2
    for call in calls:
        assert call.startswith("profile --trace=nvtx,mpi,cuda --mpi-impl=")
        assert "-o reports/r%q{" in call
    assert (tmp_path / "reports").is_dir(), "nsys does not make folders"


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_knows_its_number_from_any_launcher(
    tmp_path: Path, profiler: str, kind: str, rank: int
) -> None:
    command = [sys.executable, str(NSYS), "--ranks", "1", "--", sys.executable, "-c", SHOW]
    done = start(tmp_path, *command, path=profiler, **{RANKS[kind]: str(rank)})
    assert done.stdout.split() == ["rank", "nsys" if rank == 1 else "alone"], done.stderr
    for call in tmp_path.glob("nsys-*"):
        assert f"-o rank%q{{{RANKS[kind]}}}" in call.read_text()


def test_within_slurm_mpirun_counts(tmp_path: Path, profiler: str) -> None:
    """All ranks that mpirun starts in a batch script of Slurm have the SLURM_PROCID of the script."""
    command = [sys.executable, str(NSYS), "--ranks", "1", "--", sys.executable, "-c", SHOW]
    done = start(tmp_path, *command, path=profiler, SLURM_PROCID="0", PMI_RANK="1")
    assert done.stdout.split() == ["rank", "nsys"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run", "--", "mpirun", "-n", "2", "python", "x.py"], "nsys is not in the PATH of .*: load"),
        (["--", "python", "x.py"], "no launcher in 'python x.py', and no rank in the environment"),
        (["--", "mpirun", "-n", "2", "nothing-of-that-name"], "no program found in .*: put -- before it"),
        (["--", "mpirun", "-n", "1", "a", ":", "-n", "1", "b"], "several programs"),
        (["--ranks", "0,x", "--", "mpirun", "python"], "'0,x': give numbers of ranks"),
        ([], "no command: put it behind --"),
    ],
)
def test_wrong_use_is_explained(tmp_path: Path, arguments: list[str], says: str) -> None:
    # A PATH without nsys, but with python.
    (tmp_path / "python").symlink_to(sys.executable)
    mpi = ["--mpi", "mpich"] if "mpirun" in arguments else []
    done = start(tmp_path, sys.executable, str(NSYS), *mpi, *arguments, path=str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 0
    assert re.search(says, done.stderr), done.stderr


def test_a_rank_that_does_not_exist_is_noticed(tmp_path: Path, profiler: str) -> None:
    """Rather than that there is a report less than expected."""
    job = [MPIEXEC, "-n", "2", sys.executable, str(NSYS), "--ranks", "0,5", "--", sys.executable, "-c", SHOW]
    done = start(tmp_path, *job, path=profiler)
    assert done.returncode != 0
    assert "--ranks has 5, but there are 2 ranks" in done.stderr
    assert not list(tmp_path.glob("nsys-*"))


def test_a_rank_without_profiler_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(NSYS), "--ranks", "1", "--", sys.executable, "-c", SHOW]
    done = start(tmp_path, *command, path=str(tmp_path), PMI_RANK="1")
    assert "nsys is not in the PATH of" in done.stderr
    assert done.returncode != 0
    assert start(tmp_path, *command, path=str(tmp_path), PMI_RANK="0").returncode == 0
