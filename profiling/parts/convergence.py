"""Part e: whether it trains as well, over densities, batch sizes and ranks, as the study's sweep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from statistics import mean, stdev
from typing import Any, NamedTuple

import compare  # which finds the example

from parts.contestants import CONTESTANTS
from parts.result import Result, Row, Table

# isort: split
from datasets import DATASETS
from options import optimizer_momentum
from train_mlp import Training, layout_for

import mpitopk
from mpitopk.errors import NonFiniteError

SCHEMES = ("dense", "topk", "randomk", "forgetful")
DENSITIES = (1e-4, 1e-3, 1e-2, 1e-1)
BATCHES = (64, 256, 1024)
RANKS = (2, 4, 8, 16)
USUAL_DENSITY, USUAL_BATCH, USUAL_RANKS = 1e-3, 256, 8


class Setting(NamedTuple):
    """What is varied, and one training's options."""

    varied: str
    ranks: int
    batch: int
    contestant: str
    density: float


@dataclass(frozen=True)
class Batched(compare.Task):
    """A task with another batch than usual, that of all ranks."""

    batch: int

    def training(self, scheme: mpitopk.Scheme, seed: int) -> Training:
        return Training(self.layout, self.data, optimizer_momentum(scheme), batch=self.batch, seed=seed)


def settings() -> Iterator[Setting]:
    """Yield all trainings."""
    for name in SCHEMES:
        for density in DENSITIES if name != "dense" else [USUAL_DENSITY]:
            yield Setting("density", USUAL_RANKS, USUAL_BATCH, name, density)
    for batch in BATCHES:
        for name in ("dense", "topk"):
            yield Setting("batch", USUAL_RANKS, batch, name, USUAL_DENSITY)
    for ranks in RANKS:
        for name in ("dense", "topk"):
            yield Setting("ranks", ranks, USUAL_BATCH, name, USUAL_DENSITY)


def run(scales: dict[str, float], seeds: int) -> Result:
    """Train all on each data set; its scale: how many times as many steps as compare.py takes."""
    done: dict[tuple[Any, ...], list[compare.Point]] = {}
    rows: list[Row] = []
    for (data, scale), setting in product(scales.items(), settings()):
        key = data, *setting[1:]
        if key not in done:
            done[key] = [_train(setting, data, scale, seed) for seed in range(seeds)]
        rows.append(_row(setting, done[key]))
    notes = [
        "Simulated ranks; the example's network and hyperparameters, the same for all schemes. "
        "A larger batch takes fewer steps: as many examples are seen.",
        "Random-k draws the same entries on all ranks; those of the study others on each, without feedback.",
        'dense is one training, whatever the density beside it. "diverged": the loss is no number any more.',
    ]
    title = f"Held-out loss and accuracy, means of {seeds} seed{'s' * (seeds > 1)}"
    tables = [Table("convergence", title, rows)]
    return Result("convergence", "e. Does it train as well", tables, notes, partial(_draw, rows=rows))


def _train(setting: Setting, data: str, scale: float, seed: int) -> compare.Point:
    examples = DATASETS[data](None)
    steps = max(10, round(scale * compare.STEPS[data] * USUAL_BATCH / setting.batch))
    contestant = CONTESTANTS[setting.contestant]
    run = compare.Run(data, setting.ranks, contestant.label, setting.density, seed)
    task = Batched(examples, layout_for(examples), steps, setting.batch)
    try:
        return compare.simulated(run, task, contestant.make(setting.density))[-1]
    except NonFiniteError:
        return compare.Point(**vars(run), step=steps, bytes=0, dense=1, seconds=None, loss=inf, accuracy=0.0)


def _row(setting: Setting, points: list[compare.Point]) -> Row:
    accuracy = [100 * p.accuracy for p in points]
    diverged = any(p.loss == inf for p in points)
    return {
        "data": points[0].data,
        "varied": setting.varied,
        "ranks": setting.ranks,
        "batch": setting.batch,
        "scheme": CONTESTANTS[setting.contestant].label,
        "density": setting.density,
        "steps": points[0].step,
        "loss, bits": "diverged" if diverged else mean(p.loss for p in points),
        "accuracy, %": "diverged" if diverged else mean(accuracy),
        "its spread": stdev(accuracy) if len(points) > 1 and not diverged else "",
        "bytes, % of dense": 100 * points[0].bytes / points[0].dense,
    }


def _draw(figure: Any, rows: list[Row]) -> None:
    datasets, sweeps = list(dict.fromkeys(row["data"] for row in rows)), ("density", "batch", "ranks")
    figure.set_size_inches(12, 1 + 3.2 * len(datasets))
    grid = figure.subplots(len(datasets), len(sweeps), sharey="row", squeeze=False)
    labels: dict[str, Any] = {}
    for axes, (data, varied) in zip(grid.flat, product(datasets, sweeps), strict=True):
        here = [row for row in rows if (row["data"], row["varied"]) == (data, varied)]
        for name in SCHEMES:
            one = CONTESTANTS[name]
            chosen = [row for row in here if row["scheme"] == one.label and row["loss, bits"] != "diverged"]
            points = [(row[varied], row["accuracy, %"]) for row in chosen]
            if name == "dense" and varied == "density":
                labels[one.label] = axes.axhline(points[0][1], color=one.colour, linestyle="--")
            elif points:
                (line,) = axes.plot(*zip(*points, strict=True), color=one.colour, marker=one.marker)
                labels.setdefault(one.label, line)
        axes.set(xscale="log", xlabel={"batch": "batch, examples of all ranks"}.get(varied, varied))
        ticks = sorted({row[varied] for row in here})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if varied == sweeps[0]:
            axes.set_ylabel(f"{data}: held-out accuracy, %")
    figure.legend(labels.values(), labels, loc="outside right upper")
