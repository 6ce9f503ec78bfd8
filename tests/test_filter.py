"""A filter with a bound on what it misses: the bound, and that what passes is sent rightly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import bodies
import numpy as np
import oracle
import pytest
from test_gaussiank import DRAWS, N, sent
from worlds import LAYOUT, Array, Simulated, whole

from mpitopk import Filter, Layout, MpiTopkError, TopK
from mpitopk.schemes.filter import margins
from mpitopk.wire import message_bytes

K, SAMPLE = 900, 30
ALIKE = ("constant", "two values", "few distinct", "mostly zero")


def world(seed: int = 0, failure: float = 0.05, ranks: int = 1, device: str = "auto") -> Simulated:
    scheme = Filter(K / N, sample=SAMPLE, failure=failure, seed=seed)
    return Simulated(ranks, Layout({"all": N}), scheme, device=device)


@pytest.mark.parametrize("failure", [1e-20, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize(("n", "k", "m"), [(1000, 30, 200), (1000, 30, 40), (300, 280, 30), (188, 19, 20)])
def test_margins_are_those_of_exact_fractions(n: int, k: int, m: int, failure: float) -> None:
    found = margins(n, k, m, failure)
    assert (found.place, found.most) == oracle.margins(n, k, m, failure)
    assert oracle.binomial(m, Fraction(k, n), range(found.place, m + 1)) <= failure


def test_margins_of_many_entries() -> None:
    found = margins(25_000_000, 25_000, 100_000, 1e-3)
    assert 1.3 < found.place / 100 < 1.4
    assert 1.6 < found.most / 25_000 < 1.8


ORDERS: dict[str, Any] = {
    "by chance": lambda x: x,
    "ascending": lambda x: x[np.argsort(np.abs(x))],
    "in columns": lambda x: x[np.argsort(-np.abs(x))].reshape(30, -1).T.reshape(-1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("failure", [0.05, 0.3])
def test_misses_are_as_rare_as_stated(order: str, failure: float) -> None:
    """Of 300 draws; 3.8 standard deviations are exceeded once in 10,000 times.

    In columns, every 30-th entry is one of the largest: a sample of every 30-th would hold all or none.
    """
    x = ORDERS[order](DRAWS["Student"])[None]
    m, place, most = margins(N, K, -(-SAMPLE * N // K), failure)
    passed = []
    for seed in range(300):
        filtered = world(seed, failure)
        filtered.step(x)
        passed += sent(filtered)
    misses = oracle.binomial(m, Fraction(K, N), range(place, m + 1))
    overflows = oracle.binomial(m, Fraction(most, N), range(place))
    for seen, bound in (np.less(passed, K).sum(), misses), (np.equal(passed, K).sum(), overflows):
        assert bound <= failure
        spread = 3.8 * np.sqrt(300 * float(bound * (1 - bound)))
        assert seen <= 300 * bound + spread
        if order == "by chance":
            assert seen >= 300 * bound - spread, "the bound is as good as it can be"
    assert max(passed) <= most
    if failure < 0.1:
        assert abs(np.mean(passed) - place * N / m) < 0.05 * place * N / m


@pytest.mark.parametrize("shape", DRAWS)
def test_what_passes_is_sent(shape: str, device: str) -> None:
    """All from some magnitude on; where more pass than there is room for, as equal values, TopK's entries."""
    x = DRAWS[shape]
    exact = Simulated(1, Layout({"all": N}), TopK(K / N), device=device).step(x[None])
    for seed in range(4):
        filtered = world(seed, device=device)
        mean, (count,) = filtered.step(x[None]), sent(filtered)
        (kept,) = filtered.residuals()
        np.testing.assert_array_equal(mean + kept, x)
        assert (mean * kept == 0).all()
        if shape in ALIKE or count == K:
            assert bodies.same(mean, exact)
        else:
            assert np.abs(mean[mean != 0]).min() > np.abs(kept).max()
            assert count < K or ((mean == exact) | (exact == 0)).all(), (
                "no miss: all of the largest are there"
            )


def test_ranks_sample_for_themselves(device: str) -> None:
    gradients: Array = np.repeat(DRAWS["normal"][None], 3, axis=0)
    worlds = [world(seed, ranks=3, device=device) for seed in (0, 0, 1)]
    for each in worlds:
        each.step(gradients)
        counts = sent(each)
        assert len(set(counts)) == 3
        assert each.simulation.bytes == sum(message_bytes(count, 0, 4) for count in counts[1:])
    assert sent(worlds[0]) == sent(worlds[1]) != sent(worlds[2])


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("density", [1e-9, 0.1, 0.5, 0.99, 1.0])
def test_nothing_is_lost(ranks: int, density: float, device: str) -> None:
    bodies.conserves(Simulated(ranks, LAYOUT, Filter(density, sample=3, failure=0.2), device=device))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9])
def test_tiny_buffers_and_zeros(n: int, device: str) -> None:
    tiny = Simulated(4, Layout({"w": n}), Filter(0.5, sample=1), device=device)
    left, right = np.zeros(n), np.zeros(n)
    for step in range(4):
        gradients = whole(4, step, tiny.simulation.layout) * np.float32(step != 1)
        left += 4 * tiny.step(gradients)
        right += gradients.sum(axis=0)
    np.testing.assert_array_equal(left + np.sum(tiny.residuals(), axis=0), right)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"failure": 0}, "failure is 0: give a number from 1e-20 to 0.5"),
        ({"failure": 0.6}, "failure is 0.6"),
        ({"failure": float("nan")}, "failure is nan"),
        ({"sample": 0}, "sample is 0: give a whole number from 1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"per_segment": True}, "per_segment is True: give False"),
        ({"samples": 3}, "Filter has no option 'samples'.*sample"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(MpiTopkError, match=match):
        Filter(0.1, **options)
