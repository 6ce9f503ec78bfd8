"""Schemes against their definitions in float64, and what all of them promise."""

from __future__ import annotations

from typing import Any

import bodies
import oracle
import pytest
from worlds import LAYOUT, SEGMENTS, Mpi, Simulated, whole

from mpitopk import (
    ALQ,
    DGC,
    LAGS,
    QSGD,
    AdaComp,
    Filter,
    GaussianK,
    Grassmann,
    GTopK,
    ScaleCom,
    Simulation,
    TopK,
    warmup,
)

TIMES = {"w": 3.1e-4, "b": 0.0, "none": 0.0, "v": 5.3e-4, "s": 0.0}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "topk, 4 bits": (TopK, oracle.TopK, {"density": 0.2, "values": QSGD(bits=4)}),
    "topk, 8 bits, small ones dense": (
        *(TopK, oracle.TopK),
        {"density": 0.1, "dense_below": 20, "values": QSGD(bits=8, bucket=32, norm="l2", seed=4)},
    ),
    "topk, 2 bits, per segment": (
        *(TopK, oracle.TopK),
        {"density": 0.2, "per_segment": True, "dense_below": 8, "values": QSGD(bits=2, bucket=64)},
    ),
    "topk, 3 bits, schedule": (
        *(TopK, oracle.TopK),
        {"density": lambda step: 0.8 / (step + 1), "values": QSGD(bits=3, seed=1)},
    ),
    "topk, 5 bits, everything": (TopK, oracle.TopK, {"density": 1.0, "values": QSGD(bits=5)}),
    "dgc, 8 bits": (DGC, oracle.DGC, {"density": 0.1, "values": QSGD(bits=8, bucket=32)}),
    "dgc, sampled, 6 bits": (
        *(DGC, oracle.DGC),
        {"density": 0.05, "selector": "sampled", "dense_below": 20, "values": QSGD(bits=6)},
    ),
    "filter, 4 bits": (Filter, oracle.Filter, {"density": 0.1, "sample": 4, "values": QSGD()}),
    "gaussiank, 8 bits": (GaussianK, oracle.GaussianK, {"density": 0.1, "values": QSGD(bits=8)}),
    "dgc": (DGC, oracle.DGC, {"density": 0.05}),
    "dgc, nesterov": (DGC, oracle.DGC, {"density": 0.05, "nesterov": True}),
    "dgc, unmasked": (DGC, oracle.DGC, {"density": 0.05, "masking": False, "momentum": 0.5}),
    "dgc, clipped": (DGC, oracle.DGC, {"density": 0.05, "clip": 3.0}),
    "dgc, nesterov, clipped": (DGC, oracle.DGC, {"density": 0.1, "nesterov": True, "clip": 0.5}),
    "dgc, per segment": (DGC, oracle.DGC, {"density": 0.1, "per_segment": True, "dense_below": 8}),
    "dgc, everything": (DGC, oracle.DGC, {"density": 1.0}),
    "dgc, float16": (DGC, oracle.DGC, {"density": 0.1, "values": "float16", "dense_below": 20}),
    "dgc, warm-up": (DGC, oracle.DGC, {"density": warmup(0.01, 5)}),
    "dgc, sampled": (DGC, oracle.DGC, {"density": 0.05, "selector": "sampled"}),
    "dgc, sampled, small ones dense": (
        *(DGC, oracle.DGC),
        {"density": 0.1, "selector": "sampled", "dense_below": 20, "seed": 5, "masking": False},
    ),
    "dgc, sampled, warm-up": (DGC, oracle.DGC, {"density": warmup(0.02, 5), "selector": "sampled"}),
    "filter": (Filter, oracle.Filter, {"density": 0.1, "sample": 4, "failure": 0.1}),
    "filter, exact": (Filter, oracle.Filter, {"density": 0.1}),
    "filter, small ones dense": (
        *(Filter, oracle.Filter),
        {"density": 0.3, "sample": 8, "failure": 0.02, "dense_below": 20, "seed": 3},
    ),
    "filter, schedule": (
        *(Filter, oracle.Filter),
        {"density": lambda step: 0.8 / (step + 1), "sample": 5, "failure": 0.5},
    ),
    "filter, everything": (Filter, oracle.Filter, {"density": 1.0}),
    "gaussiank": (GaussianK, oracle.GaussianK, {"density": 0.05}),
    "gaussiank, one round": (GaussianK, oracle.GaussianK, {"density": 0.1, "rounds": 1}),
    "gaussiank, one entry": (GaussianK, oracle.GaussianK, {"density": 1e-9}),
    "gaussiank, everything": (GaussianK, oracle.GaussianK, {"density": 1.0}),
    "gaussiank, small ones dense": (GaussianK, oracle.GaussianK, {"density": 0.1, "dense_below": 20}),
    "gaussiank, float16": (GaussianK, oracle.GaussianK, {"density": 0.1, "values": "float16"}),
    "gaussiank, schedule": (GaussianK, oracle.GaussianK, {"density": lambda step: 0.4 / (step + 1)}),
    "scalecom": (ScaleCom, oracle.ScaleCom, {"density": 0.05}),
    "scalecom, filtered": (ScaleCom, oracle.ScaleCom, {"density": 0.05, "beta": 0.3}),
    "scalecom, one entry": (ScaleCom, oracle.ScaleCom, {"density": 1e-9, "beta": 0.1}),
    "scalecom, per segment": (
        *(ScaleCom, oracle.ScaleCom),
        {"density": 0.1, "per_segment": True, "dense_below": 8},
    ),
    "scalecom, everything": (ScaleCom, oracle.ScaleCom, {"density": 1.0, "beta": 0.5}),
    "qsgd": (QSGD, oracle.Quantizer, {"bucket": 32}),
    "qsgd, ternary": (QSGD, oracle.Quantizer, {"bits": 2, "bucket": 128}),
    "qsgd, 3 bits, l2": (QSGD, oracle.Quantizer, {"bits": 3, "bucket": 64, "norm": "l2", "seed": 9}),
    "qsgd, 8 bits, l2": (QSGD, oracle.Quantizer, {"bits": 8, "norm": "l2", "seed": 2**32 - 1}),
    "alq": (ALQ, oracle.Exponential, {"bits": 3, "bucket": 64, "norm": "l2"}),
    "alq, 5 bits, max": (ALQ, oracle.Exponential, {"bits": 5, "bucket": 128, "norm": "max", "seed": 3}),
    "scalecom, schedule": (
        *(ScaleCom, oracle.ScaleCom),
        {"density": lambda step: 0.2 / (step + 1), "beta": 0.5},
    ),
    "lags": (LAGS, oracle.LAGS, {"backward_seconds": TIMES, "latency": 1e-6, "bandwidth": 1e6}),
    "lags, all alone": (
        *(LAGS, oracle.LAGS),
        {"backward_seconds": dict.fromkeys(TIMES, 2.3e-4), "latency": 1e-6, "bandwidth": 1.7e6, "cap": 30},
    ),
    "lags, one exchange": (
        *(LAGS, oracle.LAGS),
        {"backward_seconds": TIMES, "latency": 9e-5, "bandwidth": 4e6, "cap": 25},
    ),
    "lags, nothing hidden": (
        *(LAGS, oracle.LAGS),
        {"backward_seconds": dict.fromkeys(TIMES, 0.0), "cap": 11},
    ),
    "lags, everything": (LAGS, oracle.LAGS, {"backward_seconds": TIMES, "cap": 1}),
    "adacomp": (AdaComp, oracle.AdaComp, {}),
    "adacomp, small bins": (AdaComp, oracle.AdaComp, {"bin": 7}),
    "adacomp, a byte for each": (AdaComp, oracle.AdaComp, {"bin": 50, "scale": 3.0}),
    "adacomp, two bytes for each": (AdaComp, oracle.AdaComp, {"bin": 129, "scale": 1.5}),
    "gtopk": (GTopK, oracle.GTopK, {"density": 0.05}),
    "gtopk, as published": (GTopK, oracle.GTopK, {"density": 0.05, "conserving": False}),
    "gtopk, one entry": (GTopK, oracle.GTopK, {"density": 1e-9}),
    "gtopk, half": (GTopK, oracle.GTopK, {"density": 0.5}),
    "gtopk, small ones dense": (GTopK, oracle.GTopK, {"density": 0.1, "dense_below": 20}),
    "gtopk, per segment": (GTopK, oracle.GTopK, {"density": 0.1, "per_segment": True, "dense_below": 8}),
    "gtopk, everything": (GTopK, oracle.GTopK, {"density": 1.0}),
    "gtopk, schedule": (GTopK, oracle.GTopK, {"density": lambda step: 0.2 / (step + 1)}),
    "scalecom, chunks": (ScaleCom, oracle.ScaleCom, {"chunk": 20}),
    "scalecom, chunks of segments": (
        *(ScaleCom, oracle.ScaleCom),
        {"chunk": 8, "per_segment": True, "beta": 0.3},
    ),
    "scalecom, chunks of large ones": (ScaleCom, oracle.ScaleCom, {"chunk": 13, "dense_below": 20}),
    "scalecom, one chunk": (ScaleCom, oracle.ScaleCom, {"chunk": 1000}),
    "scalecom, chunks of one": (ScaleCom, oracle.ScaleCom, {"chunk": 1, "beta": 0.5}),
    "grassmann": (Grassmann, oracle.Grassmann, {}),
    "grassmann, fine": (Grassmann, oracle.Grassmann, {"block": 4, "hinge_bits": 16, "seed": 5}),
    "grassmann, coarse": (Grassmann, oracle.Grassmann, {"block": 64, "bits": 3}),
    "grassmann, scalar": (Grassmann, oracle.Grassmann, {"block": 1, "bits": 0}),
}
ONE_EACH = {scheme.__name__: scheme(**options) for scheme, _, options in reversed(CASES.values())}
each_case = pytest.mark.parametrize(("scheme", "definition", "options"), CASES.values(), ids=CASES)
quiet = pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")


@each_case
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 64])
def test_simulated_ranks(
    scheme: Any, definition: Any, options: dict[str, Any], size: int, device: str
) -> None:
    world = Simulated(size, LAYOUT, scheme(**options), device=device)
    bodies.follows(world, definition(size, SEGMENTS, **options), 50 if size < 64 else 12)


@pytest.mark.mpi
@quiet
@each_case
def test_real_ranks(comm: Any, scheme: Any, definition: Any, options: dict[str, Any], device: str) -> None:
    world = Mpi(comm, LAYOUT, scheme(**options), device=device)
    bodies.follows(world, definition(comm.size, SEGMENTS, **options), 20)


@pytest.mark.mpi
@quiet
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("scheme", ONE_EACH.values(), ids=ONE_EACH)
def test_a_rank_with_nan_stops_all_and_nothing_changes(
    comm: Any, scheme: Any, rank: int, device: str
) -> None:
    """Also one that chooses for the others."""
    gradients, error, match = bodies.broken_gradients(comm.size, rank % comm.size)["nan"]
    bodies.fails_without_trace(Mpi(comm, LAYOUT, scheme, device=device), gradients, error, match)


@pytest.mark.parametrize(("scheme", "options"), [(s, o) for s, _, o in CASES.values()], ids=CASES)
def test_a_resumed_run_goes_on_to_the_bit(scheme: Any, options: dict[str, Any]) -> None:
    runs = [Simulation(3, LAYOUT, scheme(**options)) for _ in range(2)]
    for step in range(4):
        runs[0].allreduce(whole(3, step))
    runs[1].load_state_dicts(runs[0].state_dicts())
    for step in range(4, 8):
        one, other = (run.allreduce(whole(3, step)) for run in runs)
        assert bodies.same(one, other)
