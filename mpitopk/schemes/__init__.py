"""The compression schemes, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from mpitopk.errors import ConfigError, nearest
from mpitopk.schemes.adacomp import AdaComp
from mpitopk.schemes.alq import ALQ
from mpitopk.schemes.base import Density, Rank, Scheme, Sparse, State, Steps, check_options
from mpitopk.schemes.dense import Dense
from mpitopk.schemes.dgc import DGC
from mpitopk.schemes.filter import Filter
from mpitopk.schemes.gaussiank import GaussianK
from mpitopk.schemes.grassmann import Grassmann
from mpitopk.schemes.gtopk import GTopK
from mpitopk.schemes.lags import LAGS
from mpitopk.schemes.qsgd import QSGD
from mpitopk.schemes.randomk import RandomK
from mpitopk.schemes.scalecom import ScaleCom
from mpitopk.schemes.topk import TopK

SCHEMES: dict[str, type[Scheme]] = {
    "dense": Dense,
    "topk": TopK,
    "randomk": RandomK,
    "dgc": DGC,
    "gtopk": GTopK,
    "gaussiank": GaussianK,
    "filter": Filter,
    "scalecom": ScaleCom,
    "lags": LAGS,
    "adacomp": AdaComp,
    "qsgd": QSGD,
    "alq": ALQ,
    "grassmann": Grassmann,
}


def make_scheme(name: str, **options: Any) -> Scheme:
    """Return the scheme of that name.

    Raises
    ------
    ConfigError
        If there is no such scheme or option, in which case the nearest right one is named; or if
        an option that has no default is missing.

    Examples
    --------
    >>> make_scheme("topk", density=0.01).density
    0.01
    """
    if name not in SCHEMES:
        raise ConfigError(f"there is no scheme {name!r}: {nearest(name, SCHEMES)}")
    scheme = SCHEMES[name]
    check_options(scheme, options)
    needed = [f.name for f in fields(scheme) if f.default is MISSING]  # type: ignore[arg-type]
    missing = [option for option in needed if option not in options]
    if missing:
        raise ConfigError(f"{scheme.__name__} needs a value for {', '.join(missing)}")
    return scheme(**options)


def table() -> Iterator[tuple[str, ...]]:
    """Yield a heading, and then a row for each scheme: its name, what to know of it, and its options."""
    yield "name", "paper", "sends", "collectives", "memory", "options"
    for name, scheme in SCHEMES.items():
        options = [
            f.name if f.default is MISSING else f"{f.name}={f.default!r}"
            for f in fields(scheme)  # type: ignore[arg-type]
        ]
        yield name, *(text or "-" for text in scheme.about), ", ".join(options)


__all__ = [
    "ALQ",
    "DGC",
    "LAGS",
    "QSGD",
    "SCHEMES",
    "AdaComp",
    "Dense",
    "Density",
    "Filter",
    "GTopK",
    "GaussianK",
    "Grassmann",
    "RandomK",
    "Rank",
    "ScaleCom",
    "Scheme",
    "Sparse",
    "State",
    "Steps",
    "TopK",
    "make_scheme",
    "table",
]
