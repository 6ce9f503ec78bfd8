"""Part a: what selecting costs, by us and by others, against what reading the gradient once takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpitopk.bench.timing import interleave
from mpitopk.device import _native, open_device
from mpitopk.layout import Layout
from mpitopk.plan import make_plan
from parts.contestants import by_sorting
from parts.result import Result, Row, Table

FLOOR, OURS = "memory floor: read once", "ours"
SORT, RADIX = "full sort", "radix select, one thread"
LOOKS = {
    SORT: ("#d55e00", "^"),
    "argsort": ("#8c6d31", "<"),
    "argpartition": ("#0072b2", "s"),
    "torch.topk": ("#cc79a7", "D"),
    RADIX: ("#e69f00", "v"),
    OURS: ("#009e73", "o"),
}


def run(sizes: Sequence[int], densities: Sequence[float], repeats: int) -> Result:
    """Measure all sizes at the first density, and the last size at all of them."""
    cases = [(n, densities[0]) for n in sizes] + [(sizes[-1], density) for density in densities[1:]]
    rows = [row for n, density in cases for row in _compare(n, density, repeats)]
    notes = [
        "One thread each. All contestants yield the same winners, of normal draws; the table says if not.",
        '"radix select, one thread" passes over all entries 17 times, as the one block did that ran '
        "torch.topk of a vector when the study was made. It stands for that kernel in kind, not in speed.",
        '"full sort" sorts the magnitudes and then collects what reaches the k-th; "argsort" sorts indices.',
    ]
    if not find_spec("torch"):
        notes.append("torch.topk: left out, torch is not installed here.")
    title = "Selecting the k largest of n: median ms, and times as long as ours and as the memory floor"
    tables = [Table("selection", title, rows)]
    draw = partial(_draw, rows=rows, size=sizes[-1], density=densities[0])
    return Result("selection", "a. What selecting costs", tables, notes, draw)


def _compare(size: int, density: float, repeats: int) -> list[Row]:
    x = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    plan = make_plan(Layout({"all": size}), density, per_segment=False, dense_below=0)
    k, host = plan.total, open_device("host", 1)
    room = {name: (np.empty(k, np.uint32), np.empty(k, np.float32)) for name in (SORT, RADIX, OURS)}
    contestants: dict[str, Callable[[], Any]] = {
        SORT: lambda: by_sorting(x, *room[SORT]),
        RADIX: lambda: _native.radix_topk(x, *room[RADIX]),
        OURS: lambda: host.select(x, plan, *room[OURS]),
    }
    contestants["argsort"] = lambda: np.argsort(np.abs(x))[-k:]
    contestants["argpartition"] = lambda: np.argpartition(np.abs(x), -k)[-k:]
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        tensor = torch.from_numpy(x)
        contestants["torch.topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False).indices.numpy()
    engine = _native.Engine(1, _native.isas()[-1])
    contestants[FLOOR] = lambda: _native.read_floor(engine, x)
    seconds = interleave(contestants, repeats, warmup=1)
    rows = []
    for name, took in seconds.items():
        selected = room[name][0] if name in room else contestants[name]()
        same = str(np.array_equal(np.sort(selected), room[OURS][0])) if name != FLOOR else ""
        rows.append(
            {
                "selection": name,
                "n": size,
                "k": k,
                "ms": 1e3 * took,
                "ns an entry": 1e9 * took / size,
                "/ ours": took / seconds[OURS],
                "/ floor": took / seconds[FLOOR],
                "same winners": same,
            }
        )
    return rows


def _draw(figure: Any, rows: list[Row], size: int, density: float) -> None:
    figure.set_size_inches(10, 4.5)
    left, right = figure.subplots(1, 2, sharey=False)
    by_n = [row for row in rows if abs(row["k"] / row["n"] / density - 1) < 0.5]
    by_k = [row for row in rows if row["n"] == size]
    for axes, chosen, x in ((left, by_n, "n"), (right, by_k, "k")):
        for name, (colour, marker) in LOOKS.items():
            points = sorted((row[x], row["ms"]) for row in chosen if row["selection"] == name)
            if points:
                axes.loglog(*zip(*points, strict=True), color=colour, marker=marker, label=name)
        floor = sorted((row[x], row["ms"]) for row in chosen if row["selection"] == FLOOR)
        axes.loglog(*zip(*floor, strict=True), color="black", linestyle="--", label=FLOOR)
        axes.grid(alpha=0.3)
    left.set(xlabel="n, entries", ylabel="ms, median", title=f"k = {density:g} n")
    right.set(xlabel="k, entries selected", ylabel="ms, median", title=f"n = {size:,}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
