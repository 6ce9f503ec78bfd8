"""Tables of a recording: what each phase takes, and who waits for whom."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitopk.trace import COLOURS

if TYPE_CHECKING:
    from recording import Recording, Span, Track

OTHER, RECORDING = "other", "recording"
"""What no range covers; and what it took to record, which is no part of a step."""
Table = list[list[str]]


@dataclass
class Breakdown:
    """Where the time of the steps went.

    A step lasts from the end of the one before: it begins with what the program does between two
    calls of `allreduce`, and ends with the second one.

    Attributes
    ----------
    ranks, steps, phases : list
        What the axes of `ms` stand for. Phases are in the order in which they happen; `exchange` is
        without `wait` and `transfer`.
    ms : array
        Milliseconds by rank, step and phase; a phase is without others that lie within it.
    recording : float
        Milliseconds a step, on average, that went into recording and are not in `ms`.
    """

    ranks: list[int]
    steps: list[int]
    phases: list[str]
    ms: np.ndarray[Any, Any]
    recording: float

    @property
    def step(self) -> np.ndarray[Any, Any]:
        """Milliseconds by rank and step."""
        total: np.ndarray[Any, Any] = self.ms.sum(axis=2)
        return total

    @property
    def wait(self) -> np.ndarray[Any, Any] | None:
        """Milliseconds of waiting by rank and step, if they are known."""
        return self.ms[:, :, self.phases.index("wait")] if "wait" in self.phases else None

    def label(self, phase: str) -> str:
        """Return what a phase is called in tables and pictures."""
        return "exchange, rest" if phase == "exchange" and self.wait is not None else phase


class Nested(NamedTuple):
    """A span with the time in it that no other span within it covers."""

    span: Span
    own: float


def nest(spans: list[Span]) -> list[Nested]:
    """Return spans by their start, outer ones first."""
    own: list[float] = []
    open_spans: list[int] = []
    spans = sorted(spans, key=lambda span: (span.start, -span.stop))
    for span in spans:
        while open_spans and spans[open_spans[-1]].stop <= span.start:
            open_spans.pop()
        if open_spans:
            outer = open_spans[-1]
            own[outer] -= max(0.0, min(span.stop, spans[outer].stop) - span.start)
        open_spans.append(len(own))
        own.append(span.stop - span.start)
    return [Nested(span, max(0.0, rest)) for span, rest in zip(spans, own, strict=True)]


def cut(span: Span, end: dict[int, float]) -> Iterator[Span]:
    """Yield the parts of a span that lie in one step each."""
    while span.start < end.get(span.step, span.stop) < span.stop:
        yield span._replace(stop=end[span.step])
        span = span._replace(start=end[span.step], step=span.step + 1)
    yield span


def break_down(recording: Recording) -> Breakdown:
    """Return where the time of the steps went."""
    order: dict[str, None] = {}
    sums = [_sums(track, recording.steps, order) for track in recording.tracks]
    recorded = sum(s.pop(RECORDING, 0.0) for steps in sums for s in steps.values())
    phases = [name for name in order if name != RECORDING] + [OTHER]
    if "transfer" in order:
        phases.insert(phases.index("transfer"), phases.pop(phases.index("exchange")))
    ms = [[[1e-6 * s[phase] for phase in phases] for s in steps.values()] for steps in sums]
    ranks = [track.rank for track in recording.tracks]
    return Breakdown(
        ranks, recording.steps, phases, np.array(ms), 1e-6 * recorded / len(ranks) / len(recording.steps)
    )


def _sums(track: Track, steps: list[int], order: dict[str, None]) -> dict[int, defaultdict[str, float]]:
    """Return the time of each phase by step; note new phases in the order in which they come."""
    sums: dict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for span in track.spans:
        if span.name in COLOURS:
            end[span.step] = max(span.stop, end.get(span.step, span.stop))
    parts = [part for span in track.spans for part in cut(span, end)]
    for span, own in nest(parts):
        sums[span.step][span.name] += own
        order.setdefault(span.name)
        begin.setdefault(span.step, span.start)
    for step in steps:
        start = min(begin[step], end.get(step - 1, begin[step]))
        sums[step][OTHER] = max(0.0, end[step] - start - sum(sums[step].values()))
    return {step: sums[step] for step in steps}


def phase_table(found: Breakdown) -> Table:
    """Return the heading and a row for each phase."""
    rows = [["phase", "mean, ms", "median, ms", "share of the step", "slowest rank", "its mean, ms"]]
    whole = found.step.mean()
    for at, phase in enumerate(found.phases):
        ms = found.ms[:, :, at]
        rows.append(_row(found.label(phase), ms, whole, found.ranks))
    return [*rows, _row("step", found.step, whole, found.ranks)]


def _row(name: str, ms: np.ndarray[Any, Any], whole: float, ranks: list[int]) -> list[str]:
    means = ms.mean(axis=1)
    worst = int(means.argmax())
    share = f"{ms.mean() / whole:.1%}" if whole else ""
    return [name, f"{ms.mean():.3f}", f"{np.median(ms):.3f}", share, str(ranks[worst]), f"{means[worst]:.3f}"]


def last_to_come(wait: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return, for each rank, in which part of the steps the others waited for it: it waits least."""
    last = wait.argmin(axis=0)
    return np.bincount(last, minlength=len(wait)) / len(last)


def skew_table(found: Breakdown) -> Table:
    """Return the heading and a row for each rank; nothing where waiting is not known."""
    wait = found.wait
    if wait is None or len(found.ranks) == 1:
        return []
    rows = [["rank", "wait, mean ms", "median", "95 %", "longest", "share of its step", "last to come"]]
    for rank, ms, step, last in zip(found.ranks, wait, found.step, last_to_come(wait), strict=True):
        spread = [f"{x:.3f}" for x in (ms.mean(), np.median(ms), np.percentile(ms, 95), ms.max())]
        rows.append([str(rank), *spread, f"{ms.mean() / step.mean():.1%}", f"{last:.0%} of steps"])
    return rows


def verdict(found: Breakdown) -> str:
    """Return in a sentence who waits for whom."""
    wait, ranks = found.wait, len(found.ranks)
    if ranks == 1:
        return "There is one rank only: nobody waits."
    if wait is None:
        return "How much of the exchange is waiting is not known."
    last = last_to_come(wait)
    worst = int(last.argmax())
    others = np.delete(wait, worst, axis=0)
    amount = f"{np.median(others):.3f} ms (median)"
    part = f"{others.mean() / np.delete(found.step, worst, axis=0).mean():.0%} of their step"
    if last[worst] < (1 + 1 / ranks) / 2:
        return f"No rank stands out: the last one to an exchange changes. Others wait {amount}, {part}."
    return (
        f"Rank {found.ranks[worst]} comes last to the exchange in {last[worst]:.0%} of the steps: "
        f"the others wait {amount} for it, {part}."
    )


def beside_table(recording: Recording) -> Table:
    """Return, where Nsight has seen them, what kernels and MPI took in each phase that asked for them."""
    kinds = sorted({kind for track in recording.tracks for kind in track.beside})
    taken = set(recording.steps)
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    steps = 0
    for track in recording.tracks:
        outer = [span for span in track.spans if span.name in COLOURS and span.step in taken]
        outer.sort(key=lambda span: span.start)
        starts = [span.start for span in outer]
        steps += len(recording.steps)
        for kind, calls in track.beside.items():
            for at, took in calls:
                span = outer[max(0, bisect_right(starts, at) - 1)]
                if span.start <= at < span.stop:
                    sums[span.name][kind] += took
    if not sums:
        return []
    rows = [["phase", *(f"{kind}, ms a step" for kind in kinds)]]
    for phase in (name for name in COLOURS if name in sums):
        rows.append([phase, *(f"{1e-6 * sums[phase][kind] / steps:.3f}" for kind in kinds)])
    return rows


def mean_series(recording: Recording, name: str) -> dict[int, tuple[float, float, float]]:
    """Return mean, least and greatest over the ranks of a series, by step."""
    every: defaultdict[int, list[float]] = defaultdict(list)
    for track in recording.tracks:
        for step, value in track.series.get(name, {}).items():
            every[step].append(value)
    return {s: (sum(v) / len(v), min(v), max(v)) for s, v in sorted(every.items()) if s in recording.steps}
