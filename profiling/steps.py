"""Whole steps of several schemes, in turns, each phase timed: mpiexec -n 4 python profiling/steps.py vgg16

TASK is data (mnist, text, synthetic) on which the example's network really trains; or a model of the study,
whose gradients are then random numbers, other ones in every step; or a number of entries. Rank 0 prints JSON:
for each scheme the seconds of every rank, step and phase. study.py makes tables of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# First, since it limits the threads of NumPy's BLAS.
from train_mlp import PHASES, Training, layout_for, on_rank_0

# isort: split
import numpy as np
from datasets import DATASETS
from mpi4py import MPI
from parts.contestants import CONTESTANTS
from parts.models import layout_of

import mpitopk

COMM = MPI.COMM_WORLD
WARMUP = 2
SHIFTS = 4096


class Task(Protocol):
    """What a step is taken of."""

    layout: mpitopk.Layout

    def start(self) -> Any:
        """Return what one scheme works on."""

    def step(self, runtime: mpitopk.Runtime, on: Any, sparse: bool) -> None:
        """Take a step."""


class Mlp:
    """The example's training, as it is."""

    def __init__(self, data: str, steps: int) -> None:
        self.data = on_rank_0(COMM, partial(DATASETS[data], None))
        self.layout, self.steps = layout_for(self.data), steps

    def start(self) -> Training:
        """Return a training of its own."""
        return Training(self.layout, self.data, momentum=0.9)

    def step(self, runtime: mpitopk.Runtime, on: Training, sparse: bool) -> None:
        """Train for a step."""
        assert not sparse
        on.train(runtime, COMM.rank, COMM.size, self.steps, stop=runtime.step + 1)


class RandomGradients:
    """Gradients of a model's size and segments, each of another scale, and the update of its parameters."""

    def __init__(self, layout: mpitopk.Layout) -> None:
        self.layout = layout
        scales = np.random.default_rng(0).lognormal(size=len(layout.segments))
        self.noise = np.random.default_rng((1, COMM.rank)).standard_normal(
            layout.size + SHIFTS, dtype=np.float32
        )
        for segment, scale in zip(layout, scales, strict=True):
            self.noise[segment.start : segment.stop] *= np.float32(scale)
        self.parameters = np.zeros(layout.size, np.float32)
        self.change = np.empty_like(self.parameters)

    def start(self) -> None:
        """All schemes work on the same."""

    def step(self, runtime: mpitopk.Runtime, on: None, sparse: bool) -> None:  # noqa: ARG002
        """Exchange a gradient that there was not before, and make the update."""
        shift = 16 * (runtime.step % (SHIFTS // 16))
        mean = runtime.allreduce(self.noise[shift : shift + self.layout.size], sparse)
        with runtime.range("update"):
            if sparse:
                self.parameters[mean.indices] -= np.float32(0.1) * mean.values
            else:
                self.parameters -= np.multiply(mean, np.float32(0.1), out=self.change)


class Run:
    """One scheme's steps, and what they took."""

    def __init__(self, task: Task, name: str, density: float, threads: int | None) -> None:
        os.environ["MPITOPK_TIMELINE"] = os.devnull  # which lets allreduce, too, tell waiting from transfer
        self.runtime = mpitopk.Runtime(COMM, task.layout, CONTESTANTS[name].make(density), threads=threads)
        self.task, self.on, self.sparse = task, task.start(), CONTESTANTS[name].sparse
        self.about = {"contestant": name, "density": density}
        self.taken: list[list[float]] = []

    def step(self) -> None:
        """Take a step, together with the other ranks."""
        before = self.runtime.metrics.seconds
        COMM.Barrier()
        start = perf_counter()
        self.task.step(self.runtime, self.on, self.sparse)
        whole = perf_counter() - start
        after = self.runtime.metrics.seconds
        spent = {name: after[name] - before.get(name, 0.0) for name in after}
        whole -= spent.get("recording", 0.0)
        self.taken.append([*(spent.get(phase, 0.0) for phase in PHASES), whole])

    def close(self) -> dict[str, Any]:
        """Return everything, on rank 0."""
        metrics = self.runtime.metrics
        every = COMM.gather(self.taken[WARMUP:])
        moved = {"bytes": metrics.bytes / metrics.steps, "union": metrics.union}
        self.runtime.close()
        return {**self.about, **moved, "seconds": every}


def main() -> None:
    """Take the steps and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--density", nargs="+", type=float, default=[0.001])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, help="of each rank (default: its share of the processors)")
    options = parser.parse_args()
    mpitopk.abort_on_error()
    trains = options.task in DATASETS
    possible = [name for name, one in CONTESTANTS.items() if not (one.sparse and trains)]
    names = options.contestants or possible
    if set(names) - set(possible):
        parser.error("the example's momentum needs the whole mean: take another contestant, or another task")
    steps = WARMUP + options.steps
    task: Task = Mlp(options.task, steps) if trains else RandomGradients(layout_of(options.task))
    found: list[dict[str, Any]] = []
    for density in options.density:
        runs = [Run(task, name, density, options.threads) for name in names]
        for turn in range(steps):
            for at in range(len(runs)):
                runs[(turn + at) % len(runs)].step()
        found += [run.close() for run in runs]
    if COMM.rank == 0:
        sizes = {"entries": task.layout.size, "segments": len(task.layout.segments)}
        print(
            json.dumps({"task": options.task, "ranks": COMM.size, **sizes, "phases": PHASES, "runs": found})
        )


if __name__ == "__main__":
    main()
