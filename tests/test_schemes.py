"""What the schemes promise, on simulated ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import bodies
import numpy as np
import pytest
from devices import computes, got, handed
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import LAYOUT, Simulated, whole

from mpitopk import (
    ALQ,
    DGC,
    QSGD,
    AdaComp,
    Dense,
    Grassmann,
    GTopK,
    Layout,
    RandomK,
    ScaleCom,
    Simulation,
    TopK,
    make_scheme,
    warmup,
)
from mpitopk.device import open_device
from mpitopk.errors import ConfigError, ExchangeError, NonFiniteError

RANKS = [1, 2, 3, 4, 7]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", bodies.TOPK.values(), ids=bodies.TOPK)
def test_topk_follows_the_oracle(ranks: int, options: dict[str, Any], device: str) -> None:
    bodies.follows_the_oracle(Simulated(ranks, LAYOUT, TopK(**options), device=device), options)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 64),
    st.floats(1e-6, 1),
    st.booleans(),
    st.integers(0, 20),
    st.sampled_from(["float32", "float16", "float64", "bfloat16"]),
    st.integers(0, 9),
)
def test_what_always_holds(
    sizes: list[int], ranks: int, density: float, per_segment: bool, below: int, dtype: str, seed: int
) -> None:
    """Exact k, the split of each rank's sum into sent and kept, conservation; up to 64 ranks."""
    layout = Layout({str(i): size for i, size in enumerate(sizes)}, dtype=dtype)
    scheme = TopK(density, per_segment=per_segment, dense_below=below)
    simulation = Simulation(ranks, layout, scheme)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        numbers = rng.integers(-9, 10, (ranks, layout.size)).astype(np.float64)
        old = np.array([state["residual"] for state in simulation.residuals], np.float64)
        mean = simulation.allreduce(encoded(numbers, dtype)).astype(np.float64)
        new = np.array([state["residual"] for state in simulation.residuals], np.float64)
        sent = old + numbers - new
        assert (sent * new == 0).all(), "each entry is either sent or kept"
        np.testing.assert_allclose(ranks * mean, sent.sum(axis=0), rtol=1e-5, atol=1e-4)
        for participant, a, kept in zip(simulation.participants, old + numbers, new, strict=True):
            plan = participant.state.plan  # type: ignore[attr-defined]
            assert np.count_nonzero(a) - np.count_nonzero(kept) <= plan.total + plan.dense_total
            assert participant.rank.sent == plan.total + plan.dense_total


def encoded(numbers: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype)


SCHEMES = {
    "topk": TopK(0.1),
    "float16": TopK(0.1, values="float16"),
    "gtopk": GTopK(0.1, dense_below=20),
    "randomk": RandomK(0.1, seed=5),
    "schedule": TopK(lambda step: 0.1 / (step + 1)),
    "random schedule": RandomK(lambda step: 0.1 / (step + 1)),
}


@pytest.mark.parametrize("ranks", [*RANKS, 64])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_conservation(ranks: int, scheme: Any, device: str) -> None:
    bodies.conserves(Simulated(ranks, LAYOUT, scheme, device=device))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Dense()], ids=[*SCHEMES, "dense"])
def test_a_sparse_mean_is_the_dense_one(ranks: int, scheme: Any, device: str) -> None:
    worlds = [Simulated(ranks, LAYOUT, scheme, device=device) for _ in range(2)]
    bodies.sparse_is_dense(*worlds)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_a_failed_step_leaves_no_trace(ranks: int, scheme: Any, what: str, device: str) -> None:
    broken = bodies.broken_gradients(ranks, ranks - 1)[what]
    bodies.fails_without_trace(Simulated(ranks, LAYOUT, scheme, device=device), *broken)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Dense()], ids=[*SCHEMES, "dense"])
def test_skip_and_zero(scheme: Any, device: str) -> None:
    gradients = whole(3, 0)
    gradients[1, 4] = np.nan
    skipping = Simulated(3, LAYOUT, scheme, device=device, nonfinite="skip")
    assert not skipping.step(gradients).any()
    assert skipping.simulation.skipped == 1
    assert skipping.step(gradients, sparse=True).indices.size == 0
    zeroing = Simulated(3, LAYOUT, scheme, device=device, nonfinite="zero")
    cleaned = np.nan_to_num(gradients)
    theirs = [handed(device, gradient) for gradient in gradients]
    mean = got(zeroing.simulation.allreduce(theirs))
    np.testing.assert_array_equal([got(gradient) for gradient in theirs], cleaned)
    np.testing.assert_array_equal(mean, Simulated(3, LAYOUT, scheme, device=device).step(cleaned))


def test_dense_is_the_mean(device: str) -> None:
    for dtype in filter(partial(computes, device), ("float32", "float64", "float16")):
        layout = Layout({"w": 100}, dtype=dtype)
        gradients = whole(4, 0, layout, dtype)
        mean = Simulated(4, layout, Dense(), device=device).step(gradients)
        np.testing.assert_array_equal(mean, gradients.mean(axis=0, dtype=np.float64))


def test_a_sum_that_overflows_is_seen(device: str) -> None:
    for scheme in (Dense(), RandomK(0.1), TopK(0.1), DGC(0.1), ScaleCom(0.1)):
        bodies.fails_without_trace(
            Simulated(2, LAYOUT, scheme, device=device),
            np.full((2, LAYOUT.size), 3e38, np.float32),
            NonFiniteError,
            "too large",
        )


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("scheme", [Dense(), TopK(0.01), TopK(1), RandomK(0.5), TopK(0.1, dense_below=9)])
def test_tiny_buffers(n: int, scheme: Any, device: str) -> None:
    world = Simulated(3, Layout({"w": n}), scheme, device=device)
    for step in range(3):
        gradients = whole(3, step, world.simulation.layout)
        mean = world.step(gradients)
        assert mean.shape == (n,)
    if n == 1:
        np.testing.assert_array_equal(mean, (gradients.sum(axis=0) / 3).astype(np.float32))


def test_zeros_and_equal_entries(device: str) -> None:
    """Ties go to the lowest index; so do zeros, and messages keep their size."""
    for value in (0.0, -0.0, 2.5):
        world = Simulated(2, Layout({"w": 50}), TopK(0.1), device=device)
        indices, values = world.step(np.full((2, 50), value, np.float32), sparse=True)
        np.testing.assert_array_equal(indices, range(5))
        np.testing.assert_array_equal(values, np.full(5, value))


def test_random_entries_are_uniform_and_change_with_step_and_seed(device: str) -> None:
    layout, hits = Layout({"w": 97}), np.zeros(97)
    ones = np.ones((1, 97), np.float32)
    for seed in range(20):
        world = Simulated(1, layout, RandomK(0.1, seed=seed, feedback=False), device=device)
        for _ in range(100):
            hits += world.step(ones) != 0
    assert hits.sum() == 2000 * 10
    expected = 2000 * 10 / 97
    assert ((hits - expected) ** 2 / expected).sum() < 150, "chi-square, 96 degrees of freedom"


def test_segments_draw_independently_of_each_other_and_of_the_step(device: str) -> None:
    """No segment repeats what another drew, or draws in a neighbouring step."""
    layout = Layout({"a": 100, "b": 100, "c": 100})
    world = Simulated(1, layout, RandomK(0.05, per_segment=True), device=device)
    drawn = set()
    for _ in range(5):
        indices, _ = world.step(np.ones((1, 300), np.float32), sparse=True)
        drawn |= {tuple(part) for part in (indices.reshape(3, 5) % 100).tolist()}
    assert len(drawn) == 15


def test_randomk_without_feedback_keeps_nothing(device: str) -> None:
    world = Simulated(2, LAYOUT, RandomK(0.1, feedback=False), device=device)
    world.step(whole(2, 0))
    assert world.simulation.residuals == [{}, {}]


def test_float16_clamps_and_keeps_the_rest(device: str) -> None:
    world = Simulated(1, Layout({"w": 4}), TopK(0.25, values="float16"), device=device)
    mean = world.step(np.array([[1e6, 0, 0, 0]], np.float32))
    assert mean[0] == np.finfo(np.float16).max
    assert world.residuals()[0][0] == np.float32(1e6) - mean[0]


@pytest.mark.parametrize("density", [0, -0.1, 1.1, np.nan, "0.1", None])
def test_density_out_of_range(density: Any) -> None:
    for scheme in (TopK, RandomK):
        with pytest.raises(ConfigError, match=r"density is .*above 0 and up to 1"):
            scheme(density)


def test_a_schedule_out_of_range_fails_together(device: str) -> None:
    world = Simulated(2, LAYOUT, TopK(lambda step: 0.5 if step == 0 else 2.0), device=device)
    world.step(whole(2, 0))
    with pytest.raises(ConfigError, match=r"rank 0: density is 2\.0"):
        world.step(whole(2, 1))


def test_misspelt_schemes_and_options() -> None:
    with pytest.raises(ConfigError, match="did you mean 'topk'"):
        make_scheme("topkk", density=0.1)
    with pytest.raises(ConfigError, match="did you mean 'density'"):
        make_scheme("topk", densty=0.1)
    with pytest.raises(ConfigError, match="TopK needs a value for density"):
        make_scheme("topk")
    with pytest.raises(ConfigError, match="values is 'float8'"):
        TopK(0.1, values="float8")
    with pytest.raises(ConfigError, match="seed"):
        RandomK(0.1, seed=-1)
    with pytest.raises(ConfigError, match="dense_below"):
        TopK(0.1, dense_below=-1)


def test_numpys_numbers_are_numbers() -> None:
    ours = RandomK(np.float32(0.5), seed=np.int64(2**32 - 1), dense_below=np.uint8(2))
    assert ours.describe() == RandomK(0.5, seed=2**32 - 1, dense_below=2).describe()
    assert DGC(np.float64(1), momentum=np.float32(0.5), clip=np.int64(3)) == DGC(1, momentum=0.5, clip=3)
    one = {option: np.int64(32) for option in ("bucket", "seed", "bin", "block")}
    for scheme, options in (
        (QSGD, "bucket seed"),
        (AdaComp, "bin"),
        (Grassmann, "block seed"),
        (ALQ, "seed"),
    ):
        given = {option: one[option] for option in options.split()}
        assert scheme(**given) == scheme(**dict.fromkeys(given, 32))
    assert open_device("host", np.int64(2)).engine is not None  # type: ignore[attr-defined]
    assert warmup(np.float64(0.1), np.int32(5))(5) == 0.1


def test_ranks_that_differ_are_noticed() -> None:
    simulation = Simulation(2, LAYOUT, TopK(0.1))
    simulation.participants[1].rank.step = 7
    with pytest.raises(ExchangeError, match="rank 1 has step 7, expected 0"):
        simulation.allreduce(whole(2, 0))
