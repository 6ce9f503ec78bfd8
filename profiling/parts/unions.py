"""Part d: how many indices all ranks together select, on simulated ranks.

The lineage's numbers, 1.95 k, 3.7 k and 6.6 k on 2, 4 and 8 ranks, come from a simulation of whole-model
top-k with error feedback at a density of 0.001, on "weakly correlated ranks", whose other parameters are not
known. Here each gradient is `sqrt(share)` of a vector that all ranks have and `sqrt(1 - share)` of one of its
own, both normal and new in every step. The share is chosen to give their number on 2 ranks; what follows on 4
and 8 is then a prediction. Ranks with nothing in common would select 1.999 k, 3.994 k and 7.97 k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import mpitopk
from parts.result import Result, Row, Table

DENSITY = 0.001
SHARE = 0.75
LINEAGE = {2: 1.95, 4: 3.7, 8: 6.6}
Array = np.ndarray[Any, Any]


def correlated(size: int, share: float, ranks: int) -> Iterator[Array]:
    """Yield gradients that have some of their variance in common."""
    rng = np.random.default_rng(0)
    own, common = np.sqrt(1 - share, dtype=np.float32), np.sqrt(share, dtype=np.float32)
    while True:
        shared = common * rng.standard_normal(size, dtype=np.float32)
        yield own * rng.standard_normal((ranks, size), dtype=np.float32) + shared


def union(ranks: int, size: int, gradients: Iterator[Array], steps: int) -> float:
    """Return the indices that some rank selects over those that one does, mean of the later half."""
    layout = mpitopk.Layout({"all": size})
    simulation = mpitopk.Simulation(ranks, layout, mpitopk.TopK(DENSITY))
    counts = []
    for _, batch in zip(range(steps), gradients, strict=False):
        counts.append(simulation.allreduce(batch, sparse=True).indices.size)
    return float(np.mean(counts[steps // 2 :])) / simulation.participants[0].rank.sent


def run(size: int, ranks: Sequence[int], steps: int) -> Result:
    """Simulate."""
    rows: list[Row] = []
    for count in ranks:
        found = {
            name: union(count, size, correlated(size, share, count), steps)
            for name, share in (("common", SHARE), ("nothing in common", 0.0))
        }
        theirs = LINEAGE.get(count)
        rows.append(
            {
                "ranks": count,
                f"{SHARE:.0%} in common, k": found["common"],
                "nothing in common, k": found["nothing in common"],
                "all different, k": float(count),
                "lineage, k": theirs or "",
                "against it": f"{found['common'] / theirs - 1:+.1%}" if theirs else "",
            }
        )
    notes = [" ".join(__doc__.split("\n\n")[1].split())]
    title = f"Union of the selected indices, in units of k = {DENSITY:g} n, n = {size:,}, {steps} steps"
    return Result(
        "union", "d. Gradient build-up", [Table("union", title, rows)], notes, partial(_draw, rows=rows)
    )


def _draw(figure: Any, rows: list[Row]) -> None:
    figure.set_size_inches(6.5, 4.5)
    axes = figure.subplots()
    ranks = [row["ranks"] for row in rows]
    looks = {"all different, k": ("#000000", "--", ""), "nothing in common, k": ("#0072b2", "-", "s")}
    looks[f"{SHARE:.0%} in common, k"] = ("#009e73", "-", "o")
    for name, (colour, line, marker) in looks.items():
        ys = [row[name] for row in rows]
        label = name.removesuffix(", k")
        axes.loglog(ranks, ys, base=2, color=colour, linestyle=line, marker=marker, label=label)
    known = [(p, theirs) for p, theirs in LINEAGE.items() if p in ranks]
    axes.plot(*zip(*known, strict=True), "X", color="#d55e00", markersize=10, label="lineage's simulation")
    axes.set(xlabel="ranks", ylabel="indices that some rank selects, in units of k")
    axes.set_xticks(ranks, [*map(str, ranks)])
    axes.set_yticks(ranks, [*map(str, ranks)])
    axes.grid(alpha=0.3)
    axes.legend()
