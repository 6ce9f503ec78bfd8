"""The figures of compare.py."""

from __future__ import annotations

from itertools import groupby, product
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

if TYPE_CHECKING:
    from compare import Point

MARKERS = "os^vD*"


def write(points: list[Point], schemes: list[str], network: str, folder: Path) -> None:
    """Write accuracy.png and, where the network was simulated, loss.png.

    Points are in the order of the runs; where a scheme was run at several densities, they look the same.
    """
    figure = _grid(points, schemes, _end, "bytes received", "accuracy, %")
    figure.savefig(folder / "accuracy.png", dpi=150)
    if all(p.seconds is not None for p in points):
        figure = _grid(points, schemes, _curve, "seconds of communication", "loss, bits")
        figure.suptitle(network)
        figure.savefig(folder / "loss.png", dpi=150)


def _grid(points: list[Point], schemes: list[str], draw: Any, x: str, y: str) -> Figure:
    datasets, sizes = (
        list(dict.fromkeys(of)) for of in ([p.data for p in points], [p.ranks for p in points])
    )
    figure = Figure((5 * len(sizes) + 2, 4.5 * len(datasets)), layout="constrained")
    grid = figure.subplots(len(datasets), len(sizes), squeeze=False)
    named = {}
    for axes, (data, ranks) in zip(grid.flat, product(datasets, sizes), strict=True):
        here = [p for p in points if (p.data, p.ranks) == (data, ranks)]
        if not here:
            axes.remove()
            continue
        axes.set(title=f"{data}, {ranks} ranks", xlabel=x, ylabel=y, xscale="log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        for (scheme, _), runs in groupby(here, lambda p: (p.scheme, p.density)):
            at = schemes.index(scheme)
            named[scheme] = draw(axes, list(runs), color=f"C{at % 10}", marker=MARKERS[at // 10])
    figure.legend(named.values(), named, loc="outside right upper")
    return figure


def _end(axes: Any, points: list[Point], **look: Any) -> Any:
    last = {p.seed: p for p in points}.values()
    found = [100 * p.accuracy for p in last]
    spread = stdev(found) if len(found) > 1 else 0
    return axes.errorbar(mean(p.bytes for p in last), mean(found), spread, linestyle="", **look)


def _curve(axes: Any, points: list[Point], **look: Any) -> Any:
    """Draw the mean over the seeds; what diverges leaves the picture."""
    steps = [list(there) for _, there in groupby(sorted(points, key=lambda p: p.step), lambda p: p.step)]
    losses = [mean(p.loss for p in there) for there in steps]
    (line,) = axes.plot([mean(p.seconds or 0 for p in there) for there in steps], losses, **look)
    axes.set_ylim(0, max(axes.get_ylim()[1] if len(axes.lines) > 1 else 0, 1.1 * losses[0]))
    return line
