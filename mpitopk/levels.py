"""Where to put the levels of a quantiser: the least expected variance for a density of the ratios.

Faghri et al., "Adaptive gradient quantization for data-parallel SGD", NeurIPS 2020, arXiv 2010.12460.
Plain float64 without SciPy. Levels ascend from 0 to 1; all but these two are free.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

Levels = list[float]
Moments = tuple[float, float, float]
SWEEPS = 30
LEAST_MASS = 1e-15
"""Between two levels; where there is less, a level between them has no best place."""

EDGES = [0.0, *((1 + i % 8 / 8) * 2.0 ** (i // 8 - 24) for i in range(1, 193))]
"""Of the bins of `Device.count_ratios` for ratios below 1."""


class Density(ABC):
    """A probability density f of the ratios, on [0, 1]."""

    @abstractmethod
    def moments(self, low: float, high: float) -> Moments:
        """Return the integrals of f, r f and r**2 f over [low, high]."""

    def above(self, low: float, high: float, part: float) -> float:
        """Return the x in [low, high] for which [x, high] has this probability, by bisection."""
        below, over = low, high
        while below < (middle := 0.5 * (below + over)) < over:
            if self.moments(middle, high)[0] > part:
                below = middle
            else:
                over = middle
        return middle


class Histogram(Density):
    """A density that is constant in each bin, and so makes no assumption on what is rare.

    Parameters
    ----------
    counts : sequence of float
        For each bin between `EDGES`, not all of them 0.
    """

    def __init__(self, counts: Sequence[float]) -> None:
        total = sum(counts)
        self._heights = [c / total / (b - a) for c, (a, b) in zip(counts, pairwise(EDGES), strict=True)]
        whole = [_integrals(h, a, b) for h, (a, b) in zip(self._heights, pairwise(EDGES), strict=True)]
        self._before = list(accumulate(whole, _plus, initial=(0.0, 0.0, 0.0)))

    @property
    def mean_and_square(self) -> tuple[float, float]:
        """The first two moments."""
        return self._before[-1][1:]

    def moments(self, low: float, high: float) -> Moments:
        (a, b, c), (d, e, f) = self._up_to(low), self._up_to(high)
        return d - a, e - b, f - c

    def _up_to(self, x: float) -> Moments:
        i = min(bisect_right(EDGES, x), len(self._heights)) - 1
        return _plus(self._before[i], _integrals(self._heights[i], EDGES[i], x))


class Normal(Density):
    """The normal distribution of that mean and standard deviation, truncated to [0, 1]."""

    def __init__(self, mean: float, deviation: float) -> None:
        self._mean, self._deviation, self._mass = mean, deviation, 1.0
        self._mass = self._part(0, 1)

    @property
    def mass(self) -> float:
        """What the normal distribution has in [0, 1]."""
        return self._mass

    def _part(self, low: float, high: float) -> float:
        root = self._deviation * math.sqrt(2)
        both = [math.erf((x - self._mean) / root) for x in (low, high)]
        return 0.5 * (both[1] - both[0]) / self._mass

    def _height(self, x: float) -> float:
        z = (x - self._mean) / self._deviation
        return math.exp(-0.5 * z * z) / (self._deviation * math.sqrt(2 * math.pi) * self._mass)

    def moments(self, low: float, high: float) -> Moments:
        at_low, at_high, square = self._height(low), self._height(high), self._deviation**2
        zeroth = self._part(low, high)
        first = self._mean * zeroth - square * (at_high - at_low)
        second = self._mean * first + square * zeroth - square * (high * at_high - low * at_low)
        return zeroth, first, second


def _integrals(height: float, low: float, high: float) -> Moments:
    cubes = (high**3 - low**3) / 3
    return height * (high - low), height * (high * high - low * low) / 2, height * cubes


def _plus(x: Moments, y: Moments) -> Moments:
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


def fitted(counts: Sequence[float], normal: bool) -> Density | None:
    """Return the density fitted to `Device.count_ratios`, or None if it is of no use.

    A normal one has the mean and standard deviation of the ratios ("N-less" of the paper). A ratio of
    exactly 1 is a level whatever the others are, and is left out.
    """
    inside = counts[: len(EDGES) - 1]
    if not sum(inside) > 0:
        return None
    histogram = Histogram(inside)
    if not normal:
        return histogram
    mean, square = histogram.mean_and_square
    variance = square - mean * mean
    if not variance > 1e-12 * square:
        return None
    density = Normal(mean, math.sqrt(variance))
    return density if density.mass > LEAST_MASS else None


def expected_variance(density: Density, levels: Levels) -> float:
    """Return Psi: the sum over intervals of the integral of (high - r) (r - low) f(r)."""
    total = 0.0
    for low, high in pairwise(levels):
        zeroth, first, second = density.moments(low, high)
        total += max(0.0, (low + high) * first - low * high * zeroth - second)
    return total


def optimum(density: Density, low: float, high: float, level: float) -> float:
    """Return the level between two others that makes the expected variance least.

    There the derivative of the two terms vanishes: F(high) - F(level) is the integral of
    (r - low) f(r) over [low, high], divided by high - low. It is always inside.
    """
    zeroth, first, _ = density.moments(low, high)
    if not high > low or zeroth < LEAST_MASS:
        return level
    part = (first - low * zeroth) / (high - low)
    return density.above(low, high, min(max(part, 0.0), zeroth))


def descend(density: Density, levels: Levels, sweeps: int = SWEEPS) -> Levels:
    """Return the levels after coordinate descent (ALQ): the expected variance falls with each of them."""
    levels, least = list(levels), expected_variance(density, levels)
    for _ in range(sweeps):
        for j in range(1, len(levels) - 1):
            levels[j] = optimum(density, levels[j - 1], levels[j + 1], levels[j])
        last, least = least, expected_variance(density, levels)
        if least > last * (1 - 1e-6):
            break
    return levels


def slopes(density: Density, levels: Levels) -> Levels:
    """Return the derivative of the expected variance for each free level."""
    found = []
    for low, level, high in zip(levels, levels[1:], levels[2:], strict=False):
        (zeroth, first, _), (over, beyond, _) = density.moments(low, level), density.moments(level, high)
        found.append(first - low * zeroth - (high * over - beyond))
    return found


def follow_slope(density: Density, levels: Levels, steps: int = 10) -> Levels:
    """Return the levels after so many gradient steps (ALQ-G).

    No step takes a level further than half the way to the nearer neighbour, nor makes the variance larger.
    """
    levels, least = list(levels), expected_variance(density, levels)
    for _ in range(steps):
        room = [
            0.5 * min(level - low, high - level)
            for low, level, high in zip(levels, levels[1:], levels[2:], strict=False)
        ]
        slope = slopes(density, levels)
        steepest = max((abs(s) / r for s, r in zip(slope, room, strict=True) if r > 0), default=0.0)
        rate = 1 / steepest if steepest > 0 else 0.0
        while rate > 0:
            moved = [x - rate * s for x, s in zip(levels[1:-1], slope, strict=True)]
            tried = [levels[0], *moved, levels[-1]]
            if all(a <= b for a, b in pairwise(tried)):
                variance = expected_variance(density, tried)
                if variance < least:
                    levels, least = tried, variance
                    break
            rate = rate / 2 if rate * steepest > 1e-6 else 0.0
    return levels


def powers(multiplier: float, top: int) -> Levels:
    """Return 0 and the powers of the multiplier from `top` - 1 down to 0."""
    return [0.0, *(multiplier**j for j in range(top - 1, -1, -1))]


def best_powers(density: Density, top: int, last: float) -> Levels:
    """Return the levels 0 and p**j with the p of least expected variance (AMQ); `last`: one more to try."""

    def variance(p: float) -> float:
        return expected_variance(density, powers(p, top))

    tried = sorted([*(i / 64 for i in range(1, 64)), *(1 - 2**-i for i in range(7, 13)), last])
    best = min(range(len(tried)), key=lambda i: variance(tried[i]))
    low, high = tried[max(0, best - 1)], tried[min(best + 1, len(tried) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if variance(left) <= variance(right):
            high = right
        else:
            low = left
    return powers(min(tried[best], 0.5 * (low + high), key=variance), top)


def adapted(density: Density, last: Levels, form: str) -> Levels:
    """Return the levels for a density, `last` being the present ones: `form` is that of `ALQ`."""
    top = len(last) - 1
    if top < 2:
        return last
    by_powers = best_powers(density, top, last[-2])
    if form == "amq":
        return by_powers
    uniform = [j / top for j in range(top + 1)]
    start = min((last, by_powers, uniform), key=lambda levels: expected_variance(density, levels))
    return (descend if form == "alq" else follow_slope)(density, start)
