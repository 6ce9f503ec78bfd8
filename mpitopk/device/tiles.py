"""A plan as the CUDA kernels want it: cut into tiles, each the work of one block."""

from __future__ import annotations

from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.typing import Array

TILE = 4096
"""Entries of the largest tile; TILE, SMALLEST and the sample's size are those of select.cu."""
SMALLEST = 4096
LINE, LINES_APART, MOST_LINES = 8, 64, 4096

TILE_FORM = np.dtype([("start", "i8"), ("before", "i8"), ("size", "i4"), ("group", "i4")])
GROUP_FORM = np.dtype(
    [("size", "i8"), ("count", "u4"), ("offset", "u4"), ("first_tile", "i4"), ("last_tile", "i4")]
)


def cut(plan: Plan) -> tuple[Array, Array]:
    """Return tiles and groups; the tiles of groups come first, in the order of groups, then dense ones.

    Tiles end at multiples of four entries, or where a piece does.
    """
    before = [0] * (plan.counts.size + 1)
    parts = []
    for start, stop, group in plan.pieces.tolist():
        edges = np.arange(start - start % 4, stop, TILE)
        rows = np.zeros(edges.size, TILE_FORM)
        rows["start"] = np.maximum(edges, start)
        rows["size"] = np.minimum(edges + TILE, stop) - rows["start"]
        rows["before"] = before[group] + rows["start"] - start
        rows["group"] = group
        before[group] += stop - start
        parts.append(rows)
    tiles = np.concatenate(parts) if parts else np.zeros(0, TILE_FORM)
    tiles = np.concatenate([tiles[tiles["group"] >= 0], tiles[tiles["group"] < 0]])
    groups = np.zeros(plan.counts.size, GROUP_FORM)
    groups["size"] = before[:-1]
    groups["count"] = plan.counts
    groups["offset"] = np.cumsum(plan.counts) - plan.counts
    number = np.arange(plan.counts.size)
    groups["first_tile"] = np.searchsorted(tiles["group"][: _sparse(tiles)], number)
    groups["last_tile"] = np.searchsorted(tiles["group"][: _sparse(tiles)], number, side="right")
    return tiles, groups


def _sparse(tiles: Array) -> int:
    return int((tiles["group"] >= 0).sum())


def capacity(groups: Array) -> int:
    """Return for how many candidates there must be room, with a good deal to spare."""
    total = 0
    for size, count in zip(groups["size"].tolist(), groups["count"].tolist(), strict=True):
        if size < SMALLEST:
            total += size
            continue
        sample = LINE * max(64, min(MOST_LINES, size // (LINES_APART * LINE)))
        rank = count / size * sample
        rank += 5 * sqrt(rank) + 3  # where the window begins
        rank += 5 * sqrt(rank) + 3  # where the sample is wrong by so much
        total += min(size, ceil(1.5 * size * rank / sample))
    return total
