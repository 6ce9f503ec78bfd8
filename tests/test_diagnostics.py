"""Diagnostics against numbers worked out by hand, and those of distributions."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import bodies
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from worlds import LAYOUT, whole

from mpitopk import DGC, Dense, Layout, MpiTopkError, RandomK, ScaleCom, Simulation, TopK
from mpitopk.diagnostics import spread, xi

NORMAL = np.random.default_rng(0).standard_normal(1_000_000)


@pytest.mark.parametrize(("density", "remains"), [(0.001, 0.987), (0.01, 0.916), (0.1, 0.561)])
def test_what_remains_of_normal_numbers(density: float, remains: float) -> None:
    """The integral of x^2 over magnitudes below z, which a part of `density` exceeds."""
    z = -NormalDist().inv_cdf(density / 2)
    right = 1 - density - 2 * z * NormalDist().pdf(z)
    assert right == pytest.approx(remains, abs=1e-3)
    found = spread(None, NORMAL, density)
    assert found.remains == pytest.approx(right, abs=1e-3)
    assert found.remains < found.bell == pytest.approx((1 - density) ** 2)
    assert found.bound == 1 - density


@pytest.mark.parametrize("value", [2.5, -0.125])
@pytest.mark.parametrize(("n", "k"), [(1000, 1), (1000, 100), (7, 3), (64, 63)])
def test_equal_magnitudes_leave_the_universal_bound(value: float, n: int, k: int) -> None:
    found = spread(None, value * np.resize([1, -1], n), k / n)
    assert found.remains == pytest.approx(1 - k / n, rel=1e-14)
    assert found.remains > found.bell


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)), st.floats(0.01, 1))
def test_the_universal_bound_holds(x: Any, density: float) -> None:
    found = spread(None, x, density)
    assert 0 <= found.remains <= found.bound + 1e-12
    assert found.counts.sum() + found.zeros == x.size


def test_moments() -> None:
    found = spread(np.array([1.0, -1, 0, 2]), np.array([1.0, 1, 0, 2], np.float32), 0.5)
    assert found[3:5] == (1.5, 2.75)
    assert found.skewness == pytest.approx(2.25 / 2.75**1.5)
    assert found.kurtosis == pytest.approx((2 * 1.5**4 + 0.5**4 + 2.5**4) / 4 / 2.75**2)
    normal = spread(None, NORMAL, 0.01)
    assert (normal.skewness, normal.kurtosis) == (pytest.approx(0, abs=0.02), pytest.approx(3, abs=0.05))
    heavy = spread(None, np.random.default_rng(0).laplace(size=1_000_000), 0.01)
    assert heavy.kurtosis == pytest.approx(6, abs=0.3)


def test_histogram_of_magnitudes() -> None:
    x = np.array([0.5, 1, -1.5, 2, 3.9, 0, -0.0, -0.75, 4])
    found = spread(np.zeros(9), x, 0.5)
    assert found.exponents.tolist() == [-1, 0, 1, 2]
    assert found.counts.tolist() == [2, 2, 2, 1]
    assert found.zeros == 2
    tiny = spread(None, np.array([1e-45, 3e38], np.float32), 0.5)
    assert tiny.exponents[[0, -1]].tolist() == [-149, 127]
    assert tiny.counts.sum() == 2


@pytest.mark.parametrize("x", [np.zeros(5), np.full(1, -0.0), np.full(3, 7.0)])
def test_nothing_is_divided_by_zero(x: Any) -> None:
    found = spread(None, x, 0.2)
    assert np.isfinite(found[2:]).all()
    assert (found.variance, found.skewness, found.kurtosis) == (0, 0, 0)


def test_bfloat16_is_read_as_such() -> None:
    bits = (np.array([1.5, -8], np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    assert spread(np.array([0, 1], np.float32), bits, 0.5).mean == (1.5 - 7) / 2


def test_xi_by_hand() -> None:
    """The mean is (1.5, 1.5, 2, 0), of which T is (0, 0, 2, 0); the mean of T is (1.5, 1.5, 0, 0)."""
    simulation = Simulation(2, Layout({"w": 4}), TopK(0.25))
    gradients = np.array([[3, 0, 2, 0], [0, 3, 2, 0]], np.float32)
    assert xi(simulation, gradients) == 1
    simulation.allreduce(gradients)
    # The residuals are (0, 0, 2, 0) on both: now both select as the mean does.
    assert xi(simulation, gradients) == 0
    assert xi(simulation, 0 * gradients) == 0
    simulation.participants[0].state.saved["residual"][:] = [9, 0, 0, 0]
    assert xi(simulation, 0 * gradients) == math.inf


@pytest.mark.parametrize(
    "scheme",
    [
        TopK(0.1),
        TopK(0.1, per_segment=True, dense_below=8),
        ScaleCom(0.1, beta=0.5),
        RandomK(0.1, feedback=False),
    ],
)
def test_observing_changes_nothing(scheme: Any) -> None:
    watched, other = (Simulation(3, LAYOUT, scheme) for _ in range(2))
    seen = []
    for step in range(4):
        g = whole(3, step)
        seen.append(xi(watched, g))
        assert bodies.same(watched.allreduce(g), other.allreduce(g))
    assert min(seen) > 0
    assert watched.bytes == other.bytes


def test_equal_ranks_and_full_density_have_none() -> None:
    same = np.repeat(whole(1, 0), 3, axis=0)
    simulation = Simulation(3, LAYOUT, TopK(0.1))
    for _ in range(3):
        assert xi(simulation, same) < 1e-15
        simulation.allreduce(same)
    assert xi(Simulation(3, LAYOUT, TopK(1.0)), whole(3, 0)) == 0


def test_what_cannot_be_diagnosed() -> None:
    for scheme in (DGC(0.1), Dense()):
        with pytest.raises(MpiTopkError, match="does not select from residual"):
            xi(Simulation(2, LAYOUT, scheme), whole(2, 0))
    with pytest.raises(MpiTopkError, match="no entries"):
        spread(None, np.zeros(0), 0.1)
