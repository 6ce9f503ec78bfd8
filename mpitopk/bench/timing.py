"""Interleaved timing: machines drift, so contestants take turns and only ratios are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

Slowest = Callable[[float], float]
"""Takes this rank's seconds and returns those of the slowest rank."""


@dataclass
class Table:
    """The result of one benchmark.

    Attributes
    ----------
    title : str
    baselines : dict of str to str
        What each column of ratios divides by: the title of the column and the name of a contestant.
    seconds : dict of str to float
        Median of each contestant.
    shares : dict of str to dict of str to float
        For a column, how much of its baseline each contestant is compared with, if not with all of it.
    """

    title: str
    baselines: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)

    def ratio(self, name: str, column: str) -> float:
        """Return how many times as long the contestant takes as the baseline of a column."""
        share = self.shares.get(column, {}).get(name, 1)
        return self.seconds[name] / (share * self.seconds[self.baselines[column]])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        ratios = {name: {c: self.ratio(name, c) for c in self.baselines} for name in self.seconds}
        return {"title": self.title, "median_seconds": self.seconds, "ratios": ratios}

    def __str__(self) -> str:
        width = max(map(len, self.seconds)) + 2
        lines = [self.title, " " * width + "median ms" + "".join(f"{c:>18}" for c in self.baselines)]
        for name, seconds in self.seconds.items():
            ratios = "".join(f"{self.ratio(name, c):>17.2f}x" for c in self.baselines)
            lines.append(f"{name:{width}}{seconds * 1e3:9.3f}{ratios}")
        return "\n".join(lines)


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
    slowest: Slowest = lambda seconds: seconds,
) -> dict[str, float]:
    """Return the median seconds of each contestant, called in turns.

    `before` runs, untimed, before each call: with several ranks, a barrier.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            before()
            start = perf_counter()
            contestants[name]()
            seconds = slowest(perf_counter() - start)
            if turn >= warmup:
                times[name].append(seconds)
    return {name: median(each) for name, each in times.items()}
