"""Does it train as well? mpirun -n 4 python profiling/compare.py

All schemes with the same hyperparameters and seeds, on the data sets of the example; the optimiser's momentum
is 0.9, but for DGC, which has its own. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# First, since it limits the threads of NumPy's BLAS.
from train_mlp import Training, layout_for, on_rank_0

# isort: split
from datasets import DATASETS, Data
from mpi4py import MPI

import mpitopk

DENSITY = 0.01
RUNS = {"mnist": ("% right", 600), "text": ("bits/char", 2400)}
SCHEMES = {
    "Dense": mpitopk.Dense(),
    "TopK 0.01": mpitopk.TopK(DENSITY),
    "TopK 0.01, float16": mpitopk.TopK(DENSITY, values="float16"),
    "DGC 0.01": mpitopk.DGC(DENSITY),
    "ScaleCom 0.01": mpitopk.ScaleCom(DENSITY),
    "RandomK 0.01": mpitopk.RandomK(DENSITY),
    "RandomK 0.01, no feedback": mpitopk.RandomK(DENSITY, feedback=False),
}


def train(data: Data, scheme: mpitopk.Scheme, seed: int, steps: int) -> tuple[float, float]:
    """Return bits a character, or accuracy in percent; and the part of Dense's bytes."""
    comm = MPI.COMM_WORLD
    with mpitopk.Runtime(comm, layout_for(data), scheme) as runtime:
        training = Training(runtime, data, seed=seed)
        runtime.broadcast(training.parameters)
        training.train(comm.rank, comm.size, steps)
        runtime.check_replicas(training.parameters)
        loss, accuracy = training.test()
        part = runtime.metrics.bytes / max(1, runtime.metrics.dense_bytes)
    return (loss if data.text else 100 * accuracy), part


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, default=1, help="times as many as usual")
    options = parser.parse_args()
    mpitopk.abort_on_error()
    comm = MPI.COMM_WORLD

    def show(*cells: str) -> None:
        if comm.rank == 0:
            print("| " + " | ".join(cells) + " |", flush=True)

    show("data", "scheme", "result", "spread", "against Dense", "bytes")
    show("---", "---", "---", "---", "---", "---")
    for name, (unit, usual) in RUNS.items():
        steps = round(usual * options.steps)
        data = on_rank_0(comm, partial(DATASETS[name], None))
        dense = 0.0
        for title, scheme in SCHEMES.items():
            runs = [train(data, scheme, seed, steps) for seed in range(options.seeds)]
            results = [result for result, _ in runs]
            dense = mean(results) if title == "Dense" else dense
            spread = stdev(results) if len(results) > 1 else 0.0
            difference = f"{mean(results) - dense:+.3f}"
            show(name, title, f"{mean(results):.3f} {unit}", f"{spread:.3f}", difference, f"{runs[0][1]:.1%}")


if __name__ == "__main__":
    main()
