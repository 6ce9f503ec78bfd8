"""The study of Yoon & Oh (2022) again, in one command: python profiling/study.py --output results

They found top-k SGD 3.4 to 4.7 times slower than dense SGD on 8 GPUs. This measures, on this machine,

    a  what selecting costs: sorting, partitioning, radix select by one thread, ours
    b  where the time of an iteration goes, on the example's network and on gradients of the study's sizes
    c  delayed synchronisation: how far apart the ranks' selectors end, and who waits for whom
    d  gradient build-up: how many indices all ranks together select, on simulated ranks
    e  convergence over densities, batch sizes and numbers of ranks, on simulated ranks
    f  when it pays: whole steps on an emulated cluster of several bandwidths (netlab.py: Linux, root)

and writes for each part a text, its tables as CSV files and, with pip install '.[plot]', a picture.
Contestants take turns: read ratios, since times are those of a machine that may have other things to do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mpi4py
import numpy as np
from parts import breakdown, network, selection, unions
from parts.measure import mpiexec
from parts.models import MODELS
from parts.result import Result

import mpitopk

DENSITIES = (0.001, 0.0001, 0.01, 0.1)
WARMUP_DENSITIES = (0.0156, 0.004, 0.001)
RATES = (None, "10gbit", "3gbit", "1gbit")


@dataclass(frozen=True)
class Extent:
    """How much of everything: data of b, models with the densities of b, and so on.

    `training`: data of e, and how many times as many steps as compare.py takes.
    """

    data: str
    models: dict[str, tuple[float, ...]]
    sizes: tuple[int, ...]
    densities: tuple[float, ...]
    repeats: int
    steps: int
    steps_of_skew: int
    simulated: int
    simulated_ranks: tuple[int, ...]
    simulated_steps: int
    training: dict[str, float]


FULL = Extent(
    "mnist",
    {"vgg16": WARMUP_DENSITIES, "resnet18": (0.001,), "lstm": (0.001,)},
    sizes=(100_000, 1_000_000, 4_000_000, 14_728_266),
    densities=DENSITIES,
    repeats=3,
    steps=8,
    steps_of_skew=40,
    simulated=200_000,
    simulated_ranks=(2, 4, 8, 16, 32, 64),
    simulated_steps=40,
    training={"mnist": 1.0, "text": 0.25},
)
QUICK = Extent(
    "synthetic",
    {"100000": WARMUP_DENSITIES},
    sizes=(10_000, 100_000),
    densities=DENSITIES[:2],
    repeats=2,
    steps=4,
    steps_of_skew=4,
    simulated=20_000,
    simulated_ranks=(2, 4, 8),
    simulated_steps=10,
    training={"synthetic": 0.02},
)


def parts(options: argparse.Namespace) -> dict[str, Callable[[], Result]]:
    """Return what to run for each part."""
    much = QUICK if options.quick else FULL
    models = {options.size: WARMUP_DENSITIES} if options.size else much.models
    task, ranks = next(iter(models)), options.ranks
    return {
        "a": lambda: selection.run(much.sizes, much.densities, much.repeats),
        "b": lambda: breakdown.phases(ranks, {much.data: (0.01, 0.001), **models}, much.steps),
        "c": lambda: breakdown.delayed(ranks, task, much.steps_of_skew),
        "d": lambda: unions.run(much.simulated, much.simulated_ranks, much.simulated_steps),
        "e": lambda: train(much.training, options.seeds),
        "f": lambda: network.run(options.hosts, task, RATES, network.DENSITIES, much.steps),
    }


def train(scales: dict[str, float], seeds: int) -> Result:
    """Run part e, whose ranks are simulated, without MPI, which other parts start on ranks of their own."""
    mpi4py.rc.initialize = False
    from parts import convergence

    return convergence.run(scales, seeds)


def machine() -> str:
    """Return on what, with what and when."""
    mpi = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, check=False).stdout
    number = re.search(r"(?:Version:|Open MPI\))\s*(\S+)", mpi)
    library = ("MPICH" if "HYDRA" in mpi else "Open MPI") + (f" {number[1]}" if number else "")
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    versions = {"mpitopk": mpitopk.__version__, "NumPy": np.__version__, "Python": platform.python_version()}
    if find_spec("torch"):
        versions["PyTorch"] = importlib.metadata.version("torch")
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    system = f"{platform.system()}, {os.cpu_count()} processors ({model}), no GPU used"
    return f"{date.today()}. {system}. {used}, {library}."


def main() -> None:
    """Run the parts, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices="abcdef", default=list("abcdef"))
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("study"), help="default: study")
    parser.add_argument("--ranks", type=int, default=2, help="of parts b and c (default: 2)")
    parser.add_argument("--hosts", type=int, default=4, help="of part f (default: 4)")
    parser.add_argument("--size", help="entries, or a model of parts/models.py, instead of the study's")
    parser.add_argument("--seeds", type=int, default=1, help="of part e (default: 1)")
    parser.add_argument("--quick", action="store_true", help="small: shows that it runs, not how fast")
    options = parser.parse_args()
    if options.size and options.size not in MODELS and not options.size.isdecimal():
        parser.error(f"--size {options.size}: expected a number of entries, or one of {', '.join(MODELS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    if not find_spec("matplotlib"):
        print("there will be no pictures: they need pip install '.[plot]'", file=sys.stderr)
    about = f"{machine()}{' A quick run: its times mean nothing.' if options.quick else ''}"
    for name, run in parts(options).items():
        if name not in options.parts:
            continue
        if name == "f" and (why := network.why_not()):
            print(f"f is left out: {why}", file=sys.stderr)
            continue
        start = perf_counter()
        result = run()
        result.write(options.output, about)
        print(f"{result.title}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
