"""Deep gradient compression with a threshold from a sample."""

from __future__ import annotations

import bodies
import numpy as np
import pytest
from test_gaussiank import DRAWS, K, N, sent
from worlds import LAYOUT, Simulated, whole

from mpitopk import DGC, Layout, TopK
from mpitopk.wire import message_bytes


def sampled(density: float, **options: int) -> DGC:
    return DGC(density, selector="sampled", momentum=0, **options)


@pytest.mark.parametrize("shape", DRAWS)
def test_about_k_of_the_largest_are_sent(shape: str, device: str) -> None:
    """From 0.8 k to 1.3 k, none of them smaller than one that stays; or exactly those of TopK."""
    x, layout = DRAWS[shape], Layout({"all": N})
    exact = Simulated(1, layout, TopK(K / N), device=device).step(x[None])
    counts = []
    for seed in range(6):
        world = Simulated(1, layout, sampled(K / N, seed=seed), device=device)
        mean = world.step(x[None])
        (kept,), (count,) = world.residuals(), sent(world)
        np.testing.assert_array_equal(mean + kept, x)
        assert (mean * kept == 0).all(), "every entry is sent or stays"
        assert 8 * K <= 10 * count <= 13 * K
        assert bodies.same(mean, exact) or np.abs(mean[mean != 0]).min() > np.abs(kept).max()
        counts.append(count)
    alike = shape in ("constant", "two values", "few distinct", "mostly zero")
    assert (set(counts) == {K}) == alike


def test_a_threshold_that_few_reach_is_lowered(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it may not be, more draws end with the exact k."""
    exact = {}
    for rounds in (1, 10):
        monkeypatch.setattr("mpitopk.schemes.dgc.ROUNDS", rounds)
        counts = []
        for seed in range(30):
            world = Simulated(1, Layout({"all": N}), sampled(K / N, seed=seed), device=device)
            world.step(DRAWS["Cauchy"][None])
            counts += sent(world)
        exact[rounds] = counts.count(K)
    assert 0 < exact[10] < exact[1]


def test_ranks_sample_for_themselves(device: str) -> None:
    """The same gradient on all ranks: they send different numbers of its largest, and other ones by seed."""
    layout, gradients = Layout({"all": N}), np.repeat(DRAWS["normal"][None], 4, axis=0)
    found = []
    for seed in (0, 0, 1):
        world = Simulated(4, layout, sampled(K / N, seed=seed), device=device)
        world.step(gradients)
        counts = sent(world)
        assert world.simulation.bytes == sum(message_bytes(count, 0, 4) for count in counts[1:])
        found.append(counts)
    assert found[0] == found[1] != found[2]
    assert len(set(found[0] + found[2])) > 2


def test_no_position_waits(device: str) -> None:
    """Equal chances at the end of the buffer: of 20 draws, as much is sent from each half, nearly."""
    halves = np.zeros(2)
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal(N).astype(np.float32)
        mean = Simulated(1, Layout({"all": N}), sampled(K / N, seed=seed), device=device).step(x[None])
        halves += np.count_nonzero(mean.reshape(2, -1), axis=1)
    assert abs(halves[0] - halves[1]) < 4 * np.sqrt(halves.sum()), "four standard deviations"


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("density", [1e-9, 0.02, 0.3, 0.995, 1.0])
def test_nothing_is_lost(ranks: int, density: float, device: str) -> None:
    """Also where there are too few entries, or too many wanted, for a sample."""
    bodies.conserves(Simulated(ranks, LAYOUT, sampled(density), device=device))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_tiny_buffers(n: int, device: str) -> None:
    world = Simulated(3, Layout({"w": n}), sampled(0.01), device=device)
    for step in range(3):
        world.step(whole(3, step, world.simulation.layout))
        assert sent(world) == [min(n, 1)] * 3
