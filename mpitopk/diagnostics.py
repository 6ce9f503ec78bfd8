"""What there is to select from, and what a selection keeps of it: for studies, beside the steps.

All is computed in float64 by NumPy, from copies: no state is changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpitopk.device.arrays import widen
from mpitopk.device.reference import positions, topk
from mpitopk.errors import ConfigError
from mpitopk.plan import Plan, entries
from mpitopk.schemes.sparsifier import Sparsifier

if TYPE_CHECKING:
    from mpitopk.simulate import Simulation
    from mpitopk.typing import Array


class Spread(NamedTuple):
    """How the entries of residual + gradient are spread.

    Attributes
    ----------
    exponents, counts : int64 arrays
        How many entries have a magnitude from 2**e below 2**(e + 1), for each e in between, ascending.
    zeros : int
        How many are zero.
    mean, variance : float
    skewness, kurtosis : float
        Standardised third and fourth moments; 0 and 3 for normal numbers, 0 where all are equal.
    remains : float
        Part of the sum of squares that the k largest leave: ||a - T(a, k)||^2 / ||a||^2; 0 for zeros.
    bound, bell : float
        1 - k / n, which `remains` is never above, and which it is for equal magnitudes; and its square,
        which it is not above where the sorted magnitudes are bell-shaped (Shi et al., arXiv 1911.08772).
    """

    exponents: Array
    counts: Array
    zeros: int
    mean: float
    variance: float
    skewness: float
    kurtosis: float
    remains: float
    bound: float
    bell: float


def spread(residual: Array | None, gradient: Array, density: float) -> Spread:
    """Return how residual + gradient are spread.

    Parameters
    ----------
    residual : array of shape (n,), optional
        Such as `simulation.residuals[rank]["residual"]`.
    gradient : array of shape (n,)
        Finite; uint16 holds the bits of bfloat16. Both in host memory.
    density : float
        k is that part of the n entries.

    Raises
    ------
    ConfigError
        If there are no entries.
    """
    a = _candidate(residual, gradient)
    if a.size == 0:
        raise ConfigError("the gradient has no entries: give at least one")
    magnitudes = np.abs(a)
    exponents = np.frexp(magnitudes[magnitudes > 0])[1].astype(np.int64) - 1
    lowest, highest = (exponents.min(), exponents.max()) if exponents.size else (0, -1)
    mean, variance = float(a.mean()), float(a.var())
    standard = (a - mean) / math.sqrt(variance) if variance > 0 else np.zeros(1)
    k = entries(density, a.size)
    squares = a**2
    whole = squares.sum()
    if k < a.size:
        squares[topk(a, k)] = 0
    bound = 1 - k / a.size
    return Spread(
        exponents=np.arange(lowest, highest + 1),
        counts=np.bincount(exponents - lowest, minlength=highest - lowest + 1),
        zeros=a.size - exponents.size,
        mean=mean,
        variance=variance,
        skewness=float(np.mean(standard**3)),
        kurtosis=float(np.mean(standard**4)),
        remains=float(squares.sum() / whole) if whole > 0 and k < a.size else 0.0,
        bound=bound,
        bell=bound**2,
    )


def xi(simulation: Simulation, gradients: Sequence[Array] | Array) -> float:
    """Return how far selecting on every rank is from selecting from the mean, in the step to come.

    With a the sum of residual and gradient of a rank, and T what the scheme's density selects:
    ||T(mean of a) - mean of T(a)|| / ||mean of gradients||. Alistarh et al., "The convergence of sparsified
    gradient methods", NeurIPS 2018, assume that it is bounded. 0 where both norms are.

    Parameters
    ----------
    simulation : Simulation
        Before the step; it is not changed.
    gradients : sequence of arrays
        Those that the step will be given.

    Raises
    ------
    ConfigError
        If the scheme does not select from the sum of residual and gradient by a density.
    """
    scheme = simulation.participants[0].scheme
    if not isinstance(scheme, Sparsifier) or scheme.has_momentum:
        raise ConfigError(
            f"{scheme.describe()} does not select from residual + gradient: simulate a scheme that does"
        )
    plan, candidates, given = scheme.plan(simulation.participants[0].rank), [], []
    for participant, gradient in zip(simulation.participants, gradients, strict=True):
        device = participant.rank.device
        mine = device.mirror(gradient, "the gradient")
        residual = participant.state.saved.get("residual")
        kept = None if residual is None else device.mirror(residual, "the residual")
        given.append(_candidate(None, mine))
        candidates.append(_candidate(kept, mine))
    local = np.mean([_largest(a, plan) for a in candidates], axis=0)
    distance = float(np.linalg.norm(_largest(np.mean(candidates, axis=0), plan) - local))
    norm = float(np.linalg.norm(np.mean(given, axis=0)))
    return distance / norm if norm > 0 else (math.inf if distance > 0 else 0.0)


def _candidate(residual: Array | None, gradient: Array) -> Array:
    wide = widen(np.asarray(gradient), "float64").astype(np.float64)
    return wide if residual is None else wide + np.asarray(residual, np.float64)


def _largest(a: Array, plan: Plan) -> Array:
    """Return `a` where the plan selects, or sends all; zero elsewhere."""
    kept = np.zeros_like(a)
    for start, stop in plan.dense.tolist():
        kept[start:stop] = a[start:stop]
    for group, count in enumerate(plan.counts.tolist()):
        where = positions(plan, group)
        won = where[topk(a[where], count)]
        kept[won] = a[won]
    return kept
