"""Exact selection of the k largest, alone and fused with error feedback.

Ours, cold (thresholds sampled) and warm (from the last step), against NumPy's argpartition of the
magnitudes, torch.topk where torch is installed, std::nth_element, a radix select by one thread, and the
floors of memory: reading the gradient once, and adding it to the residual.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.device import open_device
from mpitopk.device.base import Device
from mpitopk.layout import Layout
from mpitopk.plan import Plan, make_plan
from mpitopk.typing import Array

DRAWS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, n: rng.standard_normal(n, dtype=np.float32),
    "laplace": lambda rng, n: rng.laplace(size=n).astype(np.float32),
    "student-t": lambda rng, n: rng.standard_t(3, n).astype(np.float32),
}
SLOW_REPEATS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", type=int, nargs="+", default=[25_000_000], help="entries")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01], help="k / size")
    parser.add_argument("--draw", choices=DRAWS, nargs="+", default=["normal"], help="distribution")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--floors-only", action="store_true", help="leave out the slow alternatives")


def run(options: argparse.Namespace) -> list[Table]:
    """Return a table for each size, density and distribution."""
    cases = [(n, d, draw) for n in options.size for draw in options.draw for d in options.density]
    return [_compare(n, density, draw, options) for n, density, draw in cases]


def _compare(size: int, density: float, draw: str, options: argparse.Namespace) -> Table:
    device = open_device("host", options.threads)
    gradient = device.empty(size, "float32")
    gradient[:] = DRAWS[draw](np.random.default_rng(0), size)
    plan = make_plan(Layout({"all": size}), density, per_segment=False, dense_below=0)
    table = Table(
        f"{size} x float32, {draw}, density {density}, {options.threads} threads",
        {
            "/ add floor": "floor: residual += gradient",
            "/ read floor": "floor: read",
            "/ ours": "select, warm",
        },
    )
    table.seconds = interleave(_ours(device, gradient, plan), options.repeats)
    if not options.floors_only:
        table.seconds |= interleave(_others(gradient, plan), SLOW_REPEATS, warmup=1)
    return table


def _ours(device: Device, gradient: Array, plan: Plan) -> dict[str, Callable[[], object]]:
    from mpitopk.device import _native

    size, k = gradient.size, plan.total
    floor = device.zeros(size, "float32")
    indices, values = device.empty(k + 1, "uint32"), device.empty(k + 1, "float32")
    engine = _native.Engine(device.engine.threads, device.engine.isa)  # type: ignore[attr-defined]
    more = Plan(plan.pieces, plan.counts + 1)

    def feedback(on: Device, plans: list[Plan]) -> Callable[[], object]:
        """Return a step: its residual lives on, and changing plans make every threshold a cold one."""
        residual, spare = on.zeros(size, "float32"), on.empty(size, "float32")

        def step() -> None:
            nonlocal residual, spare
            plans.reverse()
            k = plans[0].total
            on.accumulate_select(gradient, residual, spare, plans[0], indices[:k], values[:k])
            residual, spare = spare, residual

        return step

    def select(on: Device, plans: list[Plan]) -> Callable[[], object]:
        def step() -> None:
            plans.reverse()
            k = plans[0].total
            on.select(gradient, plans[0], indices[:k], values[:k])

        return step

    def fresh() -> Device:
        return open_device("host", engine.threads)

    return {
        "floor: residual += gradient": lambda: _native.add_floor(engine, gradient, floor),
        "floor: read": lambda: _native.read_floor(engine, gradient),
        "feedback + select, warm": feedback(fresh(), [plan, plan]),
        "feedback + select, cold": feedback(fresh(), [plan, more]),
        "select, warm": select(fresh(), [plan, plan]),
        "select, cold": select(fresh(), [plan, more]),
    }


def _others(gradient: Array, plan: Plan) -> dict[str, Callable[[], object]]:
    from mpitopk.device import _native

    k = plan.total
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    others: dict[str, Callable[[], object]] = {
        "std::nth_element": lambda: _native.nth_element_topk(gradient, indices, values),
        "radix select, one thread": lambda: _native.radix_topk(gradient, indices, values),
        "numpy abs + argpartition": lambda: np.argpartition(np.abs(gradient), -k)[-k:],
    }
    try:
        import torch
    except ImportError:
        return others
    tensor = torch.from_numpy(gradient)
    return others | {"torch.topk(x.abs())": lambda: torch.topk(tensor.abs(), k, sorted=False)}
