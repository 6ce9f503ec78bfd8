"""What holds for every layout, option and number of ranks: on simulated ranks, up to 64 of them."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import problems
import pytest
from devices import computes
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from problems import Problem
from worlds import LAYOUT, Array, Simulated, whole

from mpitopk import Dense, Layout, RandomK, TopK
from mpitopk.errors import GradientError, NonFiniteError

ranks = st.one_of(st.integers(1, 8), st.sampled_from([16, 33, 64]))


@problems.simulated
@given(ranks, problems.problems())
def test_topk(device: str, size: int, problem: Problem) -> None:
    assume(problem.suits(device))
    scheme = TopK(values=problem.values, **problem.options)
    world = Simulated(size, problem.layout, scheme, device=device)
    problems.topk_follows_the_oracle(world, problem)


@problems.simulated
@given(ranks, problems.problems(), st.booleans())
def test_randomk(device: str, size: int, problem: Problem, feedback: bool) -> None:
    assume(problem.suits(device))
    scheme = RandomK(seed=problem.seed, feedback=feedback, **problem.options)
    world = Simulated(size, problem.layout, scheme, device=device)
    problems.randomk_follows_the_oracle(world, problem, feedback)


@problems.simulated
@given(ranks, problems.problems())
def test_dense(device: str, size: int, problem: Problem) -> None:
    assume(problem.suits(device))
    problems.dense_is_the_mean(Simulated(size, problem.layout, Dense(), device=device), problem)


floats = st.floats(-(2.0**60), 2.0**60, width=32)


@problems.simulated
@given(arrays(np.float32, (4, 20), elements=floats), st.sampled_from([0.05, 0.3, 0.8]))
def test_each_entry_is_sent_or_kept_to_the_bit(device: str, gradients: Array, density: float) -> None:
    """On one rank the mean is the message: with the residual it makes up residual + gradient."""
    world = Simulated(1, Layout({"w": 20}), TopK(density), device=device)
    k, residual = round(20 * density), np.zeros(20, np.float32)
    for gradient in gradients:
        accumulated = residual + gradient
        mean = world.step(gradient[None])
        residual = world.residuals()[0]
        order = sorted(range(20), key=lambda i: (-abs(accumulated[i]), i))
        sent, kept = sorted(order[:k]), sorted(order[k:])
        np.testing.assert_array_equal(mean[sent], accumulated[sent])
        np.testing.assert_array_equal(residual[kept], accumulated[kept])
        assert not mean[kept].any()
        assert not residual[sent].any()


@problems.simulated
@given(arrays(np.float32, (3, 5, 30), elements=floats), st.data())
def test_any_floats_are_conserved_to_rounding(device: str, gradients: Array, data: st.DataObject) -> None:
    values = data.draw(st.sampled_from(["float32", "float16", "float64"]))
    assume(computes(device, values))
    world = Simulated(5, Layout({"a": 10, "b": 20}), TopK(0.2, values=values, dense_below=11), device=device)
    old = world.residuals()
    for step in range(3):
        before = np.array([*gradients[step], *old], np.float64)
        mean = world.step(gradients[step]).astype(np.float64)
        old = world.residuals()
        after = 5 * mean + np.sum(old, axis=0, dtype=np.float64)
        rounding = 1e-6 * np.abs(before).sum(axis=0) + 1e-43  # the latter of subnormal numbers
        assert (np.abs(after - before.sum(axis=0)) <= rounding).all()


KINDS: dict[str, Any] = {
    "nan": lambda g: np.where(np.arange(g.size) == 3, np.nan, g).astype(g.dtype),
    "size": lambda g: g[1:],
    "dtype": lambda g: g.astype(np.int64),
    "none": lambda _: None,
    "gpu": lambda _: bodies.OnGpu(),
}


@problems.simulated
@given(
    st.integers(1, 9), st.lists(st.sampled_from(["fine", *KINDS]), min_size=9, max_size=9), st.integers(0, 3)
)
def test_whatever_goes_wrong_anywhere(device: str, size: int, kinds: list[str], which: int) -> None:
    """All ranks raise one error; each rank that gave something unusable is named; nothing changes."""
    scheme = [TopK(0.1), TopK(lambda step: 0.1 / (1 + step)), RandomK(0.1), Dense()][which]
    world = Simulated(size, LAYOUT, scheme, device=device)
    world.step(whole(size, 0))
    kinds = kinds[:size]
    given_ = [KINDS[kind](g) if kind in KINDS else g for g, kind in zip(whole(size, 1), kinds, strict=True)]
    if set(kinds) == {"fine"}:
        world.step(given_)
        return
    before = [state for rank in world.simulation.state_dicts() for state in rank.values()]
    with pytest.raises((NonFiniteError, GradientError)) as raised:
        world.step(given_)
    unusable = [rank for rank, kind in enumerate(kinds) if kind not in ("fine", "nan")]
    blamed = unusable or [rank for rank, kind in enumerate(kinds) if kind == "nan"]
    assert raised.type is (GradientError if unusable else NonFiniteError)
    assert [rank for rank in range(size) if f"rank {rank}: " in str(raised.value)] == blamed
    after = [state for rank in world.simulation.state_dicts() for state in rank.values()]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    world.step(whole(size, 1))


@problems.simulated
@given(problems.problems(), st.integers(1, 6), st.integers(1, 6))
def test_resuming(device: str, problem: Problem, size: int, other: int) -> None:
    """On as many ranks the run goes on to the bit; on others the sum of the residuals is the same."""
    assume(problem.suits(device))
    for scheme in problems.schemes(problem).values():
        run = Simulated(size, problem.layout, scheme, device=device)
        for step in range(3):
            run.step(problem.gradients(size, step)[1])
        states = run.simulation.state_dicts()
        resumed = Simulated(size, problem.layout, scheme, device=device)
        resumed.simulation.load_state_dicts(states)
        for step in range(3, 5):
            gradients = problem.gradients(size, step)[1]
            assert bodies.same(run.step(gradients), resumed.step(gradients))
        moved = Simulated(other, problem.layout, scheme, device=device)
        moved.simulation.load_state_dicts(states)
        assert moved.steps() == 3
        if not isinstance(scheme, Dense):
            total = sum(np.concatenate([v.ravel() for k, v in s.items() if "/" in k]) for s in states)
            np.testing.assert_array_equal(np.sum(moved.residuals(), axis=0), total)
