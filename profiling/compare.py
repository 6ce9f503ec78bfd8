"""Does it train as well? mpirun -n 4 python profiling/compare.py --output results

All schemes with the same hyperparameters and seeds, on the data sets of the example, at the traffic of TopK:
the others get the density with which they move as many bytes, if they have one. The momentum of the optimiser
is 0.9, but for schemes that have their own. Prints a table in Markdown.

With --ranks-simulated 4 16 64 the ranks are simulated, and the network's time is known; where there are
several processes, they share out the runs. With --output, DIR receives

    results.csv    loss and accuracy on held-out data after every tenth of each run
    table.md       the table
    accuracy.png   accuracy at the end against the bytes that a rank has received
    loss.png       loss against the seconds that the simulated network has taken; computing takes none
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from datetime import date
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# First, since it limits the threads of NumPy's BLAS.
from train_mlp import Training, layout_for, on_rank_0

# isort: split
import numpy as np
from datasets import DATASETS, Data
from mpi4py import MPI
from options import optimizer_momentum

import mpitopk
from mpitopk.costs import Network, allreduce_bytes
from mpitopk.errors import NonFiniteError

Make = Callable[[float], mpitopk.Scheme]
Setting = tuple[str, int, str, float | None]

STEPS = {"mnist": 600, "text": 2400, "synthetic": 300}
TENTHS = 10
NETWORK = Network()
ON_NETWORK = f"On a network with {1e6 * NETWORK.latency:g} us a message and {NETWORK.bandwidth / 1e9:g} GB/s"
BACKWARD = {"w1": 1e-3, "b1": 0.0, "w2": 1e-4, "b2": 0.0}
"""What LAGS is told: seconds that a processor might take for a fourth of the batch."""
SCHEMES: dict[str, mpitopk.Scheme | Make] = {
    "Dense": mpitopk.Dense(),
    "TopK": mpitopk.TopK,
    "TopK, float16": partial(mpitopk.TopK, values="float16"),
    "TopK, QSGD": partial(mpitopk.TopK, values=mpitopk.QSGD()),
    "DGC": mpitopk.DGC,
    "DGC, unmasked": partial(mpitopk.DGC, masking=False),
    "LAGS": mpitopk.LAGS(BACKWARD, NETWORK.latency, NETWORK.bandwidth, cap=100),
    "GaussianK": mpitopk.GaussianK,
    "Filter": partial(mpitopk.Filter, sample=20),
    "ScaleCom": mpitopk.ScaleCom,
    "GTopK": mpitopk.GTopK,
    "AdaComp": mpitopk.AdaComp(),
    "QSGD": mpitopk.QSGD(),
    "ALQ": mpitopk.ALQ(),
    "Grassmann": mpitopk.Grassmann(),
    "RandomK": mpitopk.RandomK,
    "RandomK, no feedback": partial(mpitopk.RandomK, feedback=False),
}
"""By name; those whose traffic can be chosen, as a function of a density."""


@dataclass(frozen=True)
class Run:
    """One training. `density`: that of TopK with the same traffic; None where it cannot be chosen."""

    data: str
    ranks: int
    scheme: str
    density: float | None
    seed: int


def setting(run: Run) -> Setting:
    """Return what runs have in common that differ in their seed only."""
    return run.data, run.ranks, run.scheme, run.density


@dataclass(frozen=True)
class Point(Run):
    """Where a run is after some steps.

    `bytes`: received by rank 0 so far; `dense`: what a dense ring allreduce would have made it receive;
    `seconds`: of the simulated network; `loss`: in bits.
    """

    step: int
    bytes: int
    dense: int
    seconds: float | None
    loss: float
    accuracy: float

    @classmethod
    def of(
        cls, run: Run, training: Training, step: int, moved: int, dense: int, seconds: float | None
    ) -> Point:
        """Return the point, after a test."""
        loss, accuracy = training.test()
        return cls(
            **vars(run), step=step, bytes=moved, dense=dense, seconds=seconds, loss=loss, accuracy=accuracy
        )


def traffic(scheme: mpitopk.Scheme, ranks: int, layout: mpitopk.Layout) -> float:
    """Return the bytes that rank 0 receives in a step, on average over the first ones."""
    steps = min(ranks, 16)
    simulation = mpitopk.Simulation(ranks, layout, scheme)
    gradients = np.random.default_rng(0).standard_normal((ranks, layout.size), np.float32)
    for _ in range(steps):
        simulation.allreduce(gradients)
    return simulation.bytes / steps


@cache
def scheme_for(name: str, density: float | None, ranks: int, layout: mpitopk.Layout) -> mpitopk.Scheme:
    """Return the scheme that moves about as many bytes as TopK with that density."""
    make = SCHEMES[name]
    if isinstance(make, mpitopk.Scheme):
        return make
    assert density is not None
    target, own = traffic(mpitopk.TopK(density), ranks, layout), density
    for _ in range(4):
        moved = traffic(make(own), ranks, layout)
        if abs(moved - target) <= 0.01 * target:
            break
        own = min(1.0, own * target / moved)
    return make(own)


@dataclass(frozen=True)
class Task:
    """What is learnt."""

    data: Data
    layout: mpitopk.Layout
    steps: int

    def training(self, scheme: mpitopk.Scheme, seed: int) -> Training:
        """Return the example's training."""
        return Training(self.layout, self.data, optimizer_momentum(scheme), seed=seed)

    def due(self, step: int) -> bool:
        """Return whether to test after a step."""
        return step * TENTHS // self.steps > (step - 1) * TENTHS // self.steps


def over_mpi(run: Run, task: Task, scheme: mpitopk.Scheme) -> list[Point]:
    """Train on the ranks of MPI; return the points on rank 0."""
    comm, points = MPI.COMM_WORLD, []
    with mpitopk.Runtime(comm, task.layout, scheme) as runtime:
        training = task.training(scheme, run.seed)
        runtime.broadcast(training.parameters)

        def report(step: int) -> None:
            if comm.rank == 0 and task.due(step):
                moved = runtime.metrics.bytes, runtime.metrics.dense_bytes
                points.append(Point.of(run, training, step, *moved, None))

        training.train(runtime, comm.rank, comm.size, task.steps, report=report)
        runtime.check_replicas(training.parameters)
    return points


def simulated(run: Run, task: Task, scheme: mpitopk.Scheme) -> list[Point]:
    """Train on simulated ranks; return the points."""
    ranks, layout = run.ranks, task.layout
    simulation, points = mpitopk.Simulation(ranks, layout, scheme, network=NETWORK), []
    training = task.training(scheme, run.seed)
    gradients = np.zeros((ranks, layout.size), np.float32)
    for step in range(task.steps):
        for rank, gradient in enumerate(gradients):
            inputs, right = training.share(step, rank, ranks)
            passed = training.network.forward(training.parameters, inputs)
            training.backward(inputs, *passed, right, ranks, gradient)
        training.update(simulation.allreduce(gradients), step, task.steps)
        if task.due(step + 1):
            moved = simulation.bytes, allreduce_bytes(layout.nbytes, ranks) * (step + 1)
            points.append(Point.of(run, training, step + 1, *moved, simulation.clock))
    return points


def train_all(runs: list[Run], tasks: dict[str, Task], simulate: bool) -> list[Point]:
    """Return the points of all runs, on rank 0."""
    comm = MPI.COMM_WORLD
    points: list[Point] = []
    for run in runs[comm.rank :: comm.size] if simulate else runs:
        task = tasks[run.data]
        alone = simulate or comm.rank == 0
        scheme = scheme_for(run.scheme, run.density, run.ranks, task.layout) if alone else None
        if not simulate:
            scheme = comm.bcast(scheme)
        assert scheme is not None
        try:
            points += simulated(run, task, scheme) if simulate else over_mpi(run, task, scheme)
            outcome = f"{points[-1].loss:.3f} bits" if alone else ""
        except NonFiniteError as error:
            outcome = f"left out, {error}"
        if alone:
            about = f"{run.data}, {run.ranks} ranks, seed {run.seed}, {scheme.describe()}"
            print(f"{about}: {outcome}", file=sys.stderr, flush=True)
    order = [(*setting(run), run.seed) for run in runs]
    every = comm.gather(points) or []
    return sorted((p for theirs in every for p in theirs), key=lambda p: order.index((*setting(p), p.seed)))


def rows(points: list[Point], tasks: dict[str, Task]) -> Iterator[list[str]]:
    """Yield the heading and the rows of the table."""
    yield ["data", "ranks", "scheme", "traffic", "result", "spread", "against Dense", "bytes", "ms a step"]
    yield ["---"] * 9
    settings: dict[Setting, list[Point]] = {}
    for point in {(*setting(p), p.seed): p for p in points}.values():  # the last of each run
        settings.setdefault(setting(point), []).append(point)

    def results(group: list[Point]) -> list[float]:
        return [p.loss if tasks[p.data].data.text else 100 * p.accuracy for p in group]

    for (data, ranks, scheme, density), group in settings.items():
        found, dense = results(group), results(settings.get((data, ranks, "Dense", None), []))
        unit = "bits/char" if tasks[data].data.text else "% right"
        seconds = group[0].seconds
        yield [
            *(data, str(ranks), scheme, f"TopK {density:g}" if density else ""),
            f"{mean(found):.3f} {unit}",
            f"{stdev(found):.3f}" if len(found) > 1 else "",
            f"{mean(found) - mean(dense):+.3f}" if dense else "",
            f"{group[0].bytes / max(1, group[0].dense):.2%}",
            "" if seconds is None else f"{1e3 * seconds / group[0].step:.3f}",
        ]


def write(points: list[Point], table: str, folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Point))
        writer.writerows(astuple(point) for point in points)
    (folder / "table.md").write_text(table)
    if find_spec("matplotlib"):
        import figures

        figures.write(points, list(SCHEMES), ON_NETWORK, folder)


def main() -> None:
    """Train all and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATASETS, default=["mnist", "text"])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--density", nargs="+", type=float, default=[0.01], help="of TopK (default: 0.01)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, default=1, help="times as many as usual")
    parser.add_argument("--ranks-simulated", nargs="+", type=int, metavar="N", help="instead of those of MPI")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write files there")
    options = parser.parse_args()
    mpitopk.abort_on_error()
    comm = MPI.COMM_WORLD
    if options.output and comm.rank == 0 and not find_spec("matplotlib"):
        print("there will be no figures: they need pip install '.[plot]'", file=sys.stderr, flush=True)
    tasks = {}
    for name in options.data:
        data = on_rank_0(comm, partial(DATASETS[name], None))
        tasks[name] = Task(data, layout_for(data), max(1, round(STEPS[name] * options.steps)))
    runs = [
        Run(data, ranks, scheme, density, seed)
        for data, ranks, scheme in product(tasks, options.ranks_simulated or [comm.size], options.schemes)
        for density in ([None] if isinstance(SCHEMES[scheme], mpitopk.Scheme) else options.density)
        for seed in range(options.seeds)
    ]
    points = train_all(runs, tasks, simulate=bool(options.ranks_simulated))
    if comm.rank == 0:
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows(points, tasks))
        if options.ranks_simulated:
            table += f"\n{ON_NETWORK}; computing takes no time.\n"
        machine = f"{platform.system()}, {os.cpu_count()} processors ({platform.machine()})"
        table += f"\n{date.today()}, {machine}, NumPy {np.__version__}.\n"
        print(table, end="")
        if options.output:
            write(points, table, options.output)


if __name__ == "__main__":
    main()
