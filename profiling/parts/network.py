"""Part f: whole steps over networks of several bandwidths, emulated by netlab.py; where they break even."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import namespaces
import numpy as np
from namespaces import LabError
from netlab import Lab

from parts.contestants import CONTESTANTS
from parts.measure import Steps, here, steps
from parts.models import title_of
from parts.result import Result, Row, Table

NAMES = ("dense", "topk", "sparse", "sort", "radix")
DENSITIES = (0.001, 0.01)
MEMORY = "shared memory"
COMPUTING = ("accumulate", "select", "pack", "merge")


def why_not() -> str:
    """Return why there can be no emulated cluster here, or nothing."""
    try:
        namespaces.require()
        with Lab(hosts=2):
            return ""
    except LabError as error:
        return str(error)


def run(hosts: int, task: str, rates: Sequence[str | None], densities: Sequence[float], count: int) -> Result:
    """Measure at all rates and, for comparison, over shared memory."""
    found: dict[str, tuple[float, list[Steps]]] = {}
    with Lab(hosts) as lab:

        def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
            # Each host would take all processors for its own.
            return lab.run(
                [*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        for rate in rates:
            lab.limit(rate)
            seen = lab.measure() / 1e9
            found[rate or "unlimited TCP"] = seen, steps(launch, task, NAMES, densities, count)
    found[MEMORY] = inf, steps(here(hosts), task, NAMES, densities, count)
    rows = [row for rate, (seen, every) in found.items() for row in _rows(rate, seen, every)]
    crossings = _break_even(rows)
    tables = [
        Table("network", f"{title_of(task)}, {hosts} hosts: ms from accumulate to merge, slowest rank", rows),
        Table("break-even", "Above how many Gbit/s dense is quicker", crossings),
    ]
    notes = [
        "Median over steps, in turns with all others, of the whole step on the slowest rank: for dense, "
        "allreduce and division. With a sparse mean, the step returns what was sent, and "
        "the whole mean is never written; an update without momentum needs no more.",
        f"All {hosts} hosts share this machine's processors and memory, which slows computing, and TCP "
        "without a limit, down: on a cluster all but the bytes take less.",
        "Break-even: on a line in 1 / bandwidth between the two measured rates where the order changes.",
    ]
    return Result("network", "f. When it pays", tables, notes, partial(_draw, rows=rows, crossings=crossings))


def _rows(rate: str, seen: float, every: list[Steps]) -> list[Row]:
    dense = {one.density: one.exchange_step for one in every if one.contestant is CONTESTANTS["dense"]}
    return [
        {
            "network": rate,
            "Gbit/s, measured": seen,
            "density": one.density,
            "scheme": one.contestant.label,
            "step, ms": 1e3 * one.exchange_step,
            "computing, ms": 1e3 * sum(float(one.of(phase).mean()) for phase in COMPUTING),
            "transfer, ms": 1e3 * float(one.of("transfer").mean()),
            "times as quick as dense": dense[one.density] / one.exchange_step,
            "kB received": one.bytes / 1e3,
        }
        for one in every
    ]


def crossing(points: Sequence[tuple[float, float, float]]) -> str:
    """Return the bandwidth where dense becomes the quicker one.

    Points are (bandwidth, dense, other); times are taken to be linear in 1 / bandwidth.
    """
    points = sorted(points)
    if all(dense > other for _, dense, other in points):
        return "none of those measured"
    if all(dense < other for _, dense, other in points):
        return "all of those measured"
    for (low, dense, other), (high, dense2, other2) in pairwise(points):
        gain, loss = dense - other, other2 - dense2
        if gain > 0 and loss >= 0:
            part = gain / (gain + loss)
            return f"{1 / ((1 - part) / low + part / high):.2f}"
    return "no single one"


def _break_even(rows: list[Row]) -> list[Row]:
    networks = [row for row in rows if row["network"] != MEMORY]
    time = {(row["network"], row["density"], row["scheme"]): row["step, ms"] for row in networks}
    seen = {row["network"]: row["Gbit/s, measured"] for row in networks}
    dense = CONTESTANTS["dense"].label
    return [
        {
            "scheme": scheme,
            "density": density,
            "Gbit/s": crossing(
                [(g, time[n, density, dense], time[n, density, scheme]) for n, g in seen.items()]
            ),
        }
        for density in dict.fromkeys(row["density"] for row in networks)
        for scheme in dict.fromkeys(row["scheme"] for row in networks)
        if scheme != dense
    ]


def _draw(figure: Any, rows: list[Row], crossings: list[Row]) -> None:
    densities = list(dict.fromkeys(row["density"] for row in rows))
    figure.set_size_inches(5 * len(densities) + 2.5, 4.8)
    labels: dict[str, Any] = {}
    panels = figure.subplots(1, len(densities), sharey=True, squeeze=False).flat
    for axes, density in zip(panels, densities, strict=True):
        here = [row for row in rows if row["density"] == density]
        seen = [row["Gbit/s, measured"] for row in here if row["network"] != MEMORY]
        memory = 1.7 * max(seen)
        for one in (CONTESTANTS[name] for name in NAMES):
            chosen = [row for row in here if row["scheme"] == one.label]
            times = {row["Gbit/s, measured"]: row["step, ms"] for row in chosen}
            beside = times.pop(inf)
            inverse, ms = zip(*sorted((1 / gbit, ms) for gbit, ms in times.items()), strict=True)
            between = np.geomspace(min(times), max(times), 200)
            axes.loglog(between, np.interp(1 / between, inverse, ms), color=one.colour)
            look = {"color": one.colour, "marker": one.marker, "linestyle": ""}
            (labels[one.label],) = axes.plot([1 / x for x in inverse], ms, **look)
            axes.plot([memory], [beside], fillstyle="none", **look)
            for row in crossings:
                if (row["density"], row["scheme"]) == (density, one.label) and row["Gbit/s"][0].isdigit():
                    line = axes.axvline(float(row["Gbit/s"]), color=one.colour, linestyle=":")
                    labels[f"break-even: {row['Gbit/s']} Gbit/s, density {density:g}"] = line
        ticks = [tick for tick in (0.1, 0.3, 1, 2, 3, 5, 10, 30) if min(seen) / 1.1 < tick < 1.1 * max(seen)]
        axes.set_xticks([*ticks, memory], [*map(str, ticks), "shared\nmemory"])
        axes.set_xticks([], minor=True)
        axes.set(title=f"density {density:g}", xlabel="bandwidth of a link, Gbit/s")
        axes.grid(alpha=0.3, which="both")
        axes.label_outer()
    figure.axes[0].set_ylabel("ms from accumulate to merge")
    figure.legend(labels.values(), labels, loc="outside right upper")
