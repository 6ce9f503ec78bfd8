"""A threshold from the normal quantile: how many entries it sends, and that it sends them rightly."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from devices import computes
from worlds import LAYOUT, Array, Simulated, whole

from mpitopk import GaussianK, Layout, MpiTopkError, TopK
from mpitopk.wire import message_bytes

N, DENSITY, K = 30_000, 0.002, 60


def sent(world: Simulated) -> list[int]:
    return [participant.rank.sent for participant in world.simulation.participants]


def draws() -> dict[str, Array]:
    rng = np.random.default_rng(3)
    every = {
        "normal": rng.standard_normal(N),
        "Laplace": rng.laplace(size=N),
        "Student": rng.standard_t(3, N),
        "Cauchy": rng.standard_cauchy(N),
        "uniform": rng.uniform(-1, 1, N),
        "far from 0": 50 + rng.standard_normal(N),
        "constant": np.full(N, -2.5),
        "two values": rng.choice([1.0, -3.0], N),
        "few distinct": np.round(2 * rng.standard_normal(N)),
        "mostly zero": np.where(rng.uniform(size=N) < 0.001, 1.0, 0.0),
        "one large": np.where(np.arange(N) == 777, 1e26, rng.standard_normal(N)),
        "huge": 1e28 * rng.uniform(-1, 1, N),
        "subnormal": 1e-42 * rng.standard_normal(N),
    }
    return {name: x.astype(np.float32) for name, x in every.items()}


DRAWS = draws()


@pytest.mark.parametrize("shape", DRAWS)
@pytest.mark.parametrize("rounds", [1, 4, 30])
def test_about_k_of_the_largest_are_sent(shape: str, rounds: int, device: str) -> None:
    """From 2 k / 3 to 4 k / 3, none of them smaller than one that stays; or exactly those of TopK."""
    x = DRAWS[shape]
    layout = Layout({"all": N})
    world = Simulated(1, layout, GaussianK(DENSITY, rounds=rounds), device=device)
    exact = Simulated(1, layout, TopK(DENSITY), device=device)
    mean, right = world.step(x[None]), exact.step(x[None])
    (kept,), (count,) = world.residuals(), sent(world)
    np.testing.assert_array_equal(mean + kept, x)
    assert (mean * kept == 0).all(), "every entry is sent or stays"
    assert 2 * K <= 3 * count <= 4 * K
    assert bodies.same(mean, right) or np.abs(mean[mean != 0]).min() > np.abs(kept).max()
    if shape in ("constant", "two values", "mostly zero") or (shape == "uniform" and rounds == 1):
        assert bodies.same(mean, right)


@pytest.mark.parametrize(("shape", "needed"), [("normal", 1), ("Student", 3), ("Laplace", 4)])
def test_other_tails_need_more_rounds(shape: str, needed: int, device: str) -> None:
    """With fewer rounds the exact k are sent."""
    exact = Simulated(1, Layout({"all": N}), TopK(DENSITY), device=device).step(DRAWS[shape][None])
    for rounds in range(1, 5):
        world = Simulated(1, Layout({"all": N}), GaussianK(DENSITY, rounds=rounds), device=device)
        assert bodies.same(world.step(DRAWS[shape][None]), exact) == (rounds < needed)


@pytest.mark.parametrize("scale", [2.0**-30, 4.0, 2.0**41])
def test_scale_changes_nothing(scale: float, device: str) -> None:
    x = DRAWS["Student"][None]
    one, other = (Simulated(1, Layout({"all": N}), GaussianK(DENSITY), device=device) for _ in range(2))
    for _ in range(3):
        assert bodies.same(np.float32(scale) * one.step(x), other.step(np.float32(scale) * x))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("options", [{}, {"dense_below": 20}, {"values": "float16"}])
def test_nothing_is_lost(ranks: int, options: dict[str, Any], device: str) -> None:
    bodies.conserves(Simulated(ranks, LAYOUT, GaussianK(0.1, **options), device=device))
    bodies.sparse_is_dense(*(Simulated(ranks, LAYOUT, GaussianK(0.1, **options)) for _ in range(2)))


def test_ranks_send_what_they_have(device: str) -> None:
    """Different numbers of entries, none on one rank; the bytes are those of the messages."""
    gradients = np.stack([DRAWS["normal"], 0 * DRAWS["normal"], DRAWS["Student"], DRAWS["uniform"]])
    world = Simulated(4, Layout({"all": N}), GaussianK(DENSITY), device=device)
    mean = world.step(gradients)
    counts = sent(world)
    assert counts[1] == 0 < counts[2] != counts[0]
    assert world.simulation.bytes == sum(message_bytes(count, 0, 4) for count in counts[1:])
    kept = np.sum(world.residuals(), axis=0, dtype=np.float64)
    np.testing.assert_allclose(4 * mean + kept, gradients.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_zeros_send_nothing_before_and_after_others(device: str) -> None:
    world = Simulated(2, LAYOUT, GaussianK(0.1), device=device)
    zeros = np.zeros((2, LAYOUT.size), np.float32)
    assert not world.step(zeros).any()
    assert sent(world) == [0, 0]
    assert world.simulation.bytes == message_bytes(0, 0, 4)
    bodies.conserves(world)
    indices, _ = Simulated(2, LAYOUT, GaussianK(0.1), device=device).step(-zeros, sparse=True)
    assert indices.size == 0


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_tiny_buffers(n: int, device: str) -> None:
    world = Simulated(3, Layout({"w": n}), GaussianK(0.01), device=device)
    total = sum(np.abs(world.step(whole(3, step, world.simulation.layout))).sum() for step in range(4))
    assert (total > 0) == (n > 0)
    assert max(sent(world)) <= min(n, 1)


@pytest.mark.parametrize("power", [200, -200])
def test_squares_out_of_range(power: int, device: str) -> None:
    """Too large: the exact selection; too small: it counts as zero, and stays in the residual."""
    if not computes(device, "float64"):
        pytest.skip("a GPU is not used with float64")
    x = DRAWS["normal"].astype(np.float64)[None] * 10.0**power
    world = Simulated(1, Layout({"all": N}, dtype="float64"), GaussianK(DENSITY), device=device)
    world.step(x)
    assert sent(world) == [K if power > 0 else 0]


def test_resumed_on_other_ranks(device: str) -> None:
    """Residuals are shared out anew; their sum is preserved, and what is sent from then on is conserved."""
    four, two = (Simulated(p, LAYOUT, GaussianK(0.1), device=device) for p in (4, 2))
    four.step(whole(4, 0))
    two.simulation.load_state_dicts(four.simulation.state_dicts())
    np.testing.assert_array_equal(np.sum(two.residuals(), axis=0), np.sum(four.residuals(), axis=0))
    bodies.conserves(two)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rounds": 0}, "rounds is 0: give a whole number from 1"),
        ({"rounds": 2.5}, "rounds is 2.5"),
        ({"per_segment": True}, "per_segment is True: give False"),
        ({"density": 0}, "density is 0"),
        ({"round": 3}, "GaussianK has no option 'round'.*rounds"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(MpiTopkError, match=match):
        GaussianK(**{"density": 0.1, **options})
