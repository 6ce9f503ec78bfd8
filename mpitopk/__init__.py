"""Gradient compression over MPI: exact top-k with error feedback, for any framework."""

from importlib.metadata import version

from mpitopk.errors import MpiTopkError
from mpitopk.layerwise import agreed_seconds
from mpitopk.layout import Layout
from mpitopk.runtime import Runtime
from mpitopk.schedules import warmup
from mpitopk.schemes import (
    ALQ,
    DGC,
    LAGS,
    QSGD,
    SCHEMES,
    AdaComp,
    Dense,
    Filter,
    GaussianK,
    Grassmann,
    GTopK,
    RandomK,
    ScaleCom,
    Scheme,
    Sparse,
    TopK,
    make_scheme,
)
from mpitopk.simulate import Simulation
from mpitopk.state import saved_size
from mpitopk.transport import abort_on_error

__version__ = version("mpitopk")

__all__ = [
    "ALQ",
    "DGC",
    "LAGS",
    "QSGD",
    "SCHEMES",
    "AdaComp",
    "Dense",
    "Filter",
    "GTopK",
    "GaussianK",
    "Grassmann",
    "Layout",
    "MpiTopkError",
    "RandomK",
    "Runtime",
    "ScaleCom",
    "Scheme",
    "Simulation",
    "Sparse",
    "TopK",
    "abort_on_error",
    "agreed_seconds",
    "make_scheme",
    "saved_size",
    "warmup",
]
