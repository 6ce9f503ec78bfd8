"""The compression schemes, by name."""

from __future__ import annotations

from typing import Any

from mpitopk.errors import ConfigError, nearest
from mpitopk.schemes.base import Density, Rank, Scheme, Sparse, State, Steps
from mpitopk.schemes.dense import Dense
from mpitopk.schemes.randomk import RandomK
from mpitopk.schemes.topk import TopK

SCHEMES: dict[str, type[Scheme]] = {"dense": Dense, "topk": TopK, "randomk": RandomK}


def make_scheme(name: str, **options: Any) -> Scheme:
    """Return the scheme of that name.

    Raises
    ------
    ConfigError
        If there is no such scheme or option; the nearest right one is named.

    Examples
    --------
    >>> make_scheme("topk", density=0.01).density
    0.01
    """
    if name not in SCHEMES:
        raise ConfigError(f"there is no scheme {name!r}: {nearest(name, SCHEMES)}")
    return SCHEMES[name](**options)


__all__ = [
    "SCHEMES",
    "Dense",
    "Density",
    "RandomK",
    "Rank",
    "Scheme",
    "Sparse",
    "State",
    "Steps",
    "TopK",
    "make_scheme",
]
