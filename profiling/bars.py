"""The phases of each rank as stacked bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import palette
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from phases import Breakdown


def write(found: Breakdown, path: Path) -> None:
    """Write a PNG."""
    figure = Figure((9, 1.6 + 0.3 * len(found.ranks)), layout="constrained")
    axes = figure.subplots()
    names, left = [str(rank) for rank in found.ranks], 0.0
    for at, (phase, colour) in enumerate(palette.colours(found.phases).items()):
        ms = found.ms[:, :, at].mean(axis=1)
        axes.barh(
            names, ms, left=left, color=colour, label=found.label(phase), edgecolor="white", linewidth=0.5
        )
        left = left + ms
    axes.invert_yaxis()
    axes.set(xlabel="ms a step, mean", ylabel="rank", title="Where the time goes")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150, format="png")
