"""The schemes in float64, straight from their definitions and without a line of the package.

With gradients that are whole numbers below 2**10 all sums are exact in float32 too, so that results are
compared for equality.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def count(density: float, size: int) -> int:
    return min(size, max(1, math.floor(density * size + 0.5)))


def largest(a: Array, k: int) -> list[int]:
    """Positions of the k first by (magnitude descending, position ascending)."""
    return sorted(sorted(range(len(a)), key=lambda i: (-abs(a[i]), i))[:k])


class TopK:
    """Error-feedback top-k of P ranks; segments: (start, stop)."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        density: Any,
        per_segment: bool = False,
        dense_below: int = 0,
        values: str = "float32",
    ) -> None:
        self.segments = segments
        self.size = segments[-1][1]
        self.options = density, per_segment, dense_below
        self.values = np.dtype(values)
        self.residuals = np.zeros((ranks, self.size))
        self.steps = 0

    def selected(self, a: Array) -> list[int]:
        density, per_segment, dense_below = self.options
        density = density(self.steps) if callable(density) else density
        whole = [i for s, e in self.segments if e - s < dense_below for i in range(s, e)]
        parts = [list(range(s, e)) for s, e in self.segments if e - s >= dense_below]
        if not per_segment:
            parts = [[i for part in parts for i in part]]
        for part in parts:
            if part:
                whole += [part[i] for i in largest(a[part], count(density, len(part)))]
        return sorted(whole)

    def step(self, gradients: Array) -> Array:
        """Return the mean; update the residuals."""
        total = np.zeros(self.size)
        for rank, gradient in enumerate(gradients):
            a = self.residuals[rank] + gradient
            sent = np.zeros(self.size)
            at = self.selected(a)
            sent[at] = a[at].astype(self.values).astype(np.float64)
            total += sent
            self.residuals[rank] = a - sent
        self.steps += 1
        return total / len(gradients)
