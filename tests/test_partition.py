"""Selection by CuPy's own operations gives the bits of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import opened
from test_cuda import SHAPES, N, needs_cuda, room, select_both, truncated
from test_device import one_group

from mpitopk import Layout
from mpitopk.plan import Plan, make_plan

pytestmark = needs_cuda


@pytest.fixture
def on() -> Any:
    return opened("cupy", 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 600, N - 600, N - 1])
def test_exact_for_any_data(on: Any, shape: str, k: int) -> None:
    gradient = SHAPES[shape](np.random.default_rng(k)).astype(np.float32)
    select_both(on, gradient, np.zeros(N, np.float32), one_group(N, k))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("per_segment", [False, True])
@pytest.mark.parametrize("scale", [1, 0])
def test_segments_and_dense_pieces(on: Any, dtype: str, per_segment: bool, scale: int) -> None:
    """Dense pieces begin, end or lie within a group, and never win: not even where all are zero."""
    lengths = [5, 1, 4097, 3, 20_001, 700, 2, 64, 4095, 9]
    layout = Layout({str(i): n for i, n in enumerate(lengths)})
    plan = make_plan(layout, 0.02, per_segment=per_segment, dense_below=100)
    residual = np.zeros(layout.size, np.float32)
    for step in range(3):
        x = scale * np.random.default_rng(step).standard_normal(layout.size).astype(np.float32)
        residual = select_both(on, truncated(x) if dtype == "uint16" else x.astype(dtype), residual, plan)


def test_signs_do_not_count(on: Any) -> None:
    x = np.array([0.0, -0.0, -2, 2, -0.0, 1, -1, 0], np.float32)
    for k in range(1, x.size):
        select_both(on, x, np.zeros_like(x), one_group(x.size, k))


@pytest.mark.parametrize("size", [0, 7])
def test_nothing_to_select(on: Any, size: int) -> None:
    plan = Plan(np.array([[0, size, -1]][: bool(size)], np.int64).reshape(-1, 3), np.array([], np.int64))
    x = np.arange(size, dtype=np.float32)
    assert np.array_equal(select_both(on, x, np.ones_like(x), plan), x + 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 50, 99])
def test_nonfinite_entries_are_found(on: Any, bad: float, where: int) -> None:
    """Also in a dense piece."""
    plan = Plan(np.array([[0, 98, 0], [98, 100, -1]]), np.array([3]))
    x, zeros, (out, *entries) = np.ones(100, np.float32), np.zeros(100, np.float32), room(100, 3)
    assert on.select(x, plan, *entries)
    x[where] = bad
    assert not on.select(x, plan, *entries)
    assert not on.accumulate_select(x, zeros, out, plan, *entries)
    assert not on.accumulate_select(zeros, x, out, plan, *entries)
