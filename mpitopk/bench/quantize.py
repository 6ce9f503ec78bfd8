"""Quantisers: rounding a gradient to codes, and decoding one message, against adding a gradient."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.device import open_device
from mpitopk.layout import Layout
from mpitopk.schemes import ALQ, QSGD, Rank
from mpitopk.schemes.quantizer import Quantizer

FLOOR = "floor: residual += gradient"
SCHEMES: tuple[Quantizer, ...] = (
    QSGD(bits=2, bucket=128),
    QSGD(bits=4),
    QSGD(bits=4, norm="l2"),
    QSGD(bits=8),
    ALQ(bits=3),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", type=int, nargs="+", default=[25_000_000], help="entries")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")


def run(options: argparse.Namespace) -> list[Table]:
    """Return a table for each size."""
    return [_compare(size, options.threads, options.repeats) for size in options.size]


def _compare(size: int, threads: int, repeats: int) -> Table:
    from mpitopk.device import _native

    device = open_device("host", threads)
    gradient, sums = device.empty(size, "float32"), device.zeros(size, "float32")
    gradient[:] = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    engine = _native.Engine(threads, _native.isas()[-1])
    contestants: dict[str, Callable[[], object]] = {FLOOR: partial(_native.add_floor, engine, gradient, sums)}
    rank = Rank(0, 1, Layout({"all": size}), device)
    for scheme in SCHEMES:
        state = scheme.init(rank)
        name = f"{type(scheme).__name__} {scheme.bits} bits, buckets of {scheme.bucket}, {scheme.norm}"
        levels = state.levels  # type: ignore[attr-defined]
        known = None if isinstance(scheme, ALQ) else levels
        merge = partial(device.merge_codes, state.message.alone, known, scheme.bits, scheme.bucket, 1)  # type: ignore[attr-defined]
        contestants[f"{name}: quantize"] = partial(scheme.encode, rank, state, gradient, levels)  # type: ignore[arg-type]
        contestants[f"{name}: merge"] = partial(merge, sums)
    table = Table(f"{size} x float32, normal, {threads} threads", {"/ add floor": FLOOR})
    table.seconds = interleave(contestants, repeats)
    return table
