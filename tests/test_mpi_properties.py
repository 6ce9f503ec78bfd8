"""The properties again, on real ranks that draw the same problems in lockstep."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import problems
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import Problem
from test_properties import KINDS
from worlds import LAYOUT, Mpi, whole

from mpitopk import Dense, RandomK, TopK
from mpitopk.errors import GradientError, NonFiniteError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning"),
]


@problems.together
@given(problems.problems(), st.integers(0, 200))
def test_topk(comm: Any, device: str, problem: Problem, slack: int) -> None:
    """Also with so small a limit that an exchange goes in rounds."""
    assume(problem.suits(device))
    scheme = TopK(values=problem.values, **problem.options)
    with problems.lockstep(comm):
        limit = max(comm.size, 8) + slack
        world = Mpi(comm, problem.layout, scheme, device=device, limit=limit)
        problems.topk_follows_the_oracle(world, problem)
        world.runtime.close()


@problems.together
@given(problems.problems(), st.booleans())
def test_randomk(comm: Any, device: str, problem: Problem, feedback: bool) -> None:
    assume(problem.suits(device))
    scheme = RandomK(seed=problem.seed, feedback=feedback, **problem.options)
    with problems.lockstep(comm):
        world = Mpi(comm, problem.layout, scheme, device=device)
        problems.randomk_follows_the_oracle(world, problem, feedback)
        world.runtime.close()


@problems.together
@given(problems.problems())
def test_dense(comm: Any, device: str, problem: Problem) -> None:
    assume(problem.suits(device))
    with problems.lockstep(comm):
        world = Mpi(comm, problem.layout, Dense(), device=device)
        problems.dense_is_the_mean(world, problem)
        world.runtime.close()


@problems.together
@given(st.lists(st.sampled_from(["fine", *KINDS]), min_size=64, max_size=64), st.integers(0, 3))
def test_whatever_goes_wrong_anywhere(comm: Any, device: str, kinds: list[str], which: int) -> None:
    """All ranks raise one error, with one text, that names the ranks; the next step works."""
    scheme = [TopK(0.1), TopK(lambda step: 0.1 / (1 + step)), RandomK(0.1), Dense()][which]
    with problems.lockstep(comm):
        world = Mpi(comm, LAYOUT, scheme, device=device)
        world.step(whole(comm.size, 0))
        kinds = kinds[: comm.size]
        gradients = whole(comm.size, 1)
        wrong = [KINDS[kind](g) if kind in KINDS else g for g, kind in zip(gradients, kinds, strict=True)]
        if set(kinds) != {"fine"}:
            before = world.runtime.state_dict()
            with pytest.raises((NonFiniteError, GradientError)) as raised:
                world.step(wrong)
            assert len(set(comm.allgather((raised.type.__name__, str(raised.value))))) == 1
            unusable = [rank for rank, kind in enumerate(kinds) if kind not in ("fine", "nan")]
            blamed = unusable or [rank for rank, kind in enumerate(kinds) if kind == "nan"]
            assert raised.type is (GradientError if unusable else NonFiniteError)
            assert [rank for rank in range(comm.size) if f"rank {rank}: " in str(raised.value)] == blamed
            after = world.runtime.state_dict()
            assert all(bodies.same(before[key], after[key]) for key in before if "/" in key)
            assert str(before["mpitopk"]) == str(after["mpitopk"])
        world.step(gradients)
        world.runtime.close()


@problems.together
@given(problems.problems())
def test_real_and_simulated_ranks_give_the_same_bits(comm: Any, device: str, problem: Problem) -> None:
    """For any floats: the order of additions is that of the ranks in both."""
    assume(problem.suits(device))
    scheme = TopK(values=problem.values, **problem.options)
    rng = np.random.default_rng(problem.seed)
    with problems.lockstep(comm):
        world = Mpi(comm, problem.layout, scheme, device=device)
        other = problems.Simulated(comm.size, problem.layout, scheme, device="numpy")
        for _ in range(3):
            numbers = rng.standard_cauchy((comm.size, problem.layout.size)).clip(-6e4, 6e4)
            gradients = numbers.astype(problem.layout.storage)
            if problem.layout.dtype == "bfloat16":
                gradients = (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            mean = problems.spread(problem, world.step(gradients, problem.sparse))
            assert bodies.same(mean, problems.spread(problem, other.step(gradients, problem.sparse)))
            assert all(map(bodies.same, world.residuals(), other.residuals()))
        world.runtime.close()
