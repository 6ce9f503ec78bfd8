"""Densities that change from step to step."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

from mpitopk.errors import ConfigError


def warmup(density: float, steps: int, factor: float = 0.25) -> Callable[[int], float]:
    """Return a schedule that begins with many entries and sends fewer stage by stage.

    Lin et al., "Deep gradient compression", ICLR 2018, section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 % and
    0.1 % in the first epochs. Mind that above a density of about 1 / ranks a dense allreduce moves less.

    Parameters
    ----------
    density : float
        What it ends with, in (0, 1].
    steps : int
        Length of a stage: the steps of an epoch, say.
    factor : float
        Density of the first stage, and of each stage in parts of the one before, in (0, 1).

    Examples
    --------
    >>> [warmup(0.001, 10)(step) for step in (0, 9, 10, 35, 1000)]
    [0.25, 0.25, 0.0625, 0.00390625, 0.001]
    """
    if not 0 < density <= 1 or not 0 < factor < 1:
        raise ConfigError(f"density is {density!r} and factor {factor!r}: give numbers above 0 and below 1")
    if not isinstance(steps, Integral) or steps < 1:
        raise ConfigError(f"steps is {steps!r}: give a whole number from 1")
    return lambda step: max(density, factor ** (1 + step // steps))
