"""Parts b and c: where a step's time goes, how far apart the ranks' selectors end, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import palette
from phases import skew_table, verdict

from parts.contestants import CONTESTANTS
from parts.measure import Steps, steps_here
from parts.models import MODELS, title_of
from parts.result import Result, Row, Table

REAL = tuple(name for name, one in CONTESTANTS.items() if not one.sparse)
SELECTORS = ("sort", "radix", "topk")
PERCENTILES = (1, 25, 50, 75, 99)


def phases(ranks: int, tasks: dict[str, Sequence[float]], count: int) -> Result:
    """Measure the steps of each task, at its densities."""
    found: list[Steps] = []
    for task, densities in tasks.items():
        names = tuple(name for name in REAL if name != "layers" or task in MODELS)
        found += steps_here(ranks, task, names, tuple(densities), count)
    rows = [_row(one) for one in found]
    title = "Milliseconds a step, medians over ranks and steps; step: of the slowest rank"
    notes = [
        f"{ranks} ranks on this machine, in turns with all others, over shared memory: there is no network.",
        "The example: its forward, backward and update. Models of the study: gradients are random numbers, "
        "scaled by segment, so forward and backward are none; the update is SGD without momentum.",
        "Ours accumulates while it selects: both are under select. By sorting or radix it cannot.",
        "Dense is run anew beside each density, since contestants take turns.",
    ]
    return Result(
        "breakdown",
        "b. Where the time of an iteration goes",
        [Table("breakdown", title, rows)],
        notes,
        partial(_draw_phases, found=found),
    )


def _row(one: Steps) -> Row:
    found = one.breakdown()
    ms = np.median(found.ms, axis=(0, 1))
    names = ["exchange, rest" if name == "exchange" else name for name in found.phases]
    return {
        "task": title_of(one.task),
        "entries": one.entries,
        "segments": one.segments,
        "scheme": one.contestant.label,
        "density": "" if one.contestant is CONTESTANTS["dense"] else one.density,
        **{f"{name}, ms": float(value) for name, value in zip(names, ms, strict=True)},
        "step, ms": float(1e3 * np.median(one.whole.max(axis=0))),
    }


def _draw_phases(figure: Any, found: list[Steps]) -> None:
    tasks = list(dict.fromkeys(one.task for one in found))
    figure.set_size_inches(11, 1 + 2.2 * len(tasks))
    labels: dict[str, Any] = {}
    for axes, task in zip(figure.subplots(len(tasks), 1, squeeze=False).flat, tasks, strict=True):
        density = min(one.density for one in found if one.task == task)
        chosen = [one for one in found if one.task == task and one.density == density]
        names, left = [one.contestant.label for one in chosen], np.zeros(len(chosen))
        every = [one.breakdown() for one in chosen]
        for at, (phase, colour) in enumerate(palette.colours(every[0].phases).items()):
            ms = np.array([float(b.ms[:, :, at].mean()) for b in every])
            bar = axes.barh(names, ms, left=left, color=colour, edgecolor="white", linewidth=0.5)
            labels.setdefault("exchange, rest" if phase == "exchange" else phase, bar)
            left += ms
        axes.invert_yaxis()
        axes.set(xlabel="ms a step, mean", title=f"{title_of(task)}, density {density:g}")
    figure.legend(labels.values(), labels, loc="outside right upper")


def delayed(ranks: int, task: str, count: int) -> Result:
    """Measure how far apart the selectors of the ranks end, and what of the exchange is waiting."""
    found = steps_here(ranks, task, REAL, (0.001,), count)
    chosen = {name: one for name, one in zip(REAL, found, strict=True) if name in SELECTORS}
    rows, by_rank, notes = [], [], []
    for one in chosen.values():
        skew = _skew(one)
        waiting, transfer = one.of("wait"), one.of("transfer")
        spread = np.percentile(skew, PERCENTILES)
        rows.append(
            {
                "selection": one.contestant.label,
                "select, median ms": float(1e3 * np.median(one.of("accumulate") + one.of("select"))),
                **{f"skew {p} %, ms": float(ms) for p, ms in zip(PERCENTILES, spread, strict=True)},
                "wait, mean ms": float(1e3 * waiting.mean()),
                "transfer, mean ms": float(1e3 * transfer.mean()),
                "waiting, % of the exchange": float(100 * waiting.sum() / one.of("exchange").sum()),
            }
        )
        head, *body = skew_table(one.breakdown())
        by_rank += [{"selection": one.contestant.label, **dict(zip(head, row, strict=True))} for row in body]
        notes.append(f"{one.contestant.label}: {verdict(one.breakdown())}")
    notes.append(
        "Skew: in each step, accumulate and select of the slowest rank less those of the quickest. "
        "That of the study: in the median 29.6 ms on 8 V100 and 32.0 ms on 8 A100, of 185 and "
        "212 ms of selecting."
    )
    tables = [
        Table("skew", f"{title_of(task)}, density 0.001, {ranks} ranks", rows),
        Table("waiting", "Who waits for whom", by_rank),
    ]
    title = "c. Delayed synchronisation"
    return Result("skew", title, tables, notes, partial(_draw_skew, found=list(chosen.values())))


def _skew(one: Steps) -> np.ndarray[Any, Any]:
    """Return how far apart the ranks' selections end in each step, in ms, given that they begin together."""
    took = one.of("accumulate") + one.of("select")
    apart: np.ndarray[Any, Any] = 1e3 * (took.max(axis=0) - took.min(axis=0))
    return apart


def _draw_skew(figure: Any, found: list[Steps]) -> None:
    figure.set_size_inches(10, 4.8)
    left, right = figure.subplots(1, 2)
    for one in found:
        skew = np.sort(_skew(one))
        share = 100 * np.arange(1, skew.size + 1) / skew.size
        left.step(skew, share, color=one.contestant.colour, label=one.contestant.label, where="post")
    left.set(xlabel="skew between the ranks' selectors, ms", ylabel="% of steps at most so far apart")
    left.set_xscale("log")
    left.grid(alpha=0.3)
    names, start = [one.contestant.label for one in found], np.zeros(len(found))
    for phase in ("wait", "transfer"):
        ms = np.array([1e3 * float(one.of(phase).mean()) for one in found])
        right.barh(names, ms, left=start, color=palette.PHASES[phase], label=phase)
        start += ms
    right.invert_yaxis()
    right.set(xlabel="exchange, ms a step, mean")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))
    right.legend(loc="lower right")
