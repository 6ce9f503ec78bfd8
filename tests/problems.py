"""Random problems, the same on simulated ranks and, in lockstep, on real ones."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from devices import computes
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from worlds import Array, Mpi, Simulated

import mpitopk
from mpitopk import Layout, RandomK, TopK

World = Simulated | Mpi
simulated = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
together = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""No draw may depend on time, chance or an earlier failure: ranks would draw different problems."""


@dataclass(frozen=True)
class Problem:
    """A layout and what the schemes are asked to do with it."""

    layout: Layout
    options: dict[str, Any]
    values: str
    sparse: bool
    seed: int

    def suits(self, device: str) -> bool:
        """Return whether the device can take it on."""
        return computes(device, self.layout.dtype, self.values)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return [(s.start, s.stop) for s in self.layout]

    def gradients(self, ranks: int, step: int) -> tuple[Array, Array]:
        """Whole numbers with many ties: as float64, and as the layout holds them."""
        rng = np.random.default_rng((self.seed, ranks, step))
        numbers = rng.integers(-40, 41, (ranks, self.layout.size)).astype(np.float64)
        if self.layout.dtype != "bfloat16":
            return numbers, numbers.astype(self.layout.dtype)
        return numbers, (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@st.composite
def problems(draw: Any) -> Problem:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "float64", "bfloat16"]))
    steep = draw(st.sampled_from([None, None, 2, 5]))
    density = draw(st.sampled_from([1e-9, 0.01, 0.1, 0.5, 0.9, 1.0]))
    options = {
        "density": (lambda step: density / (1 + step * steep)) if steep else density,
        "per_segment": draw(st.booleans()),
        "dense_below": draw(st.sampled_from([0, 0, 3, 20, 100])),
    }
    return Problem(
        Layout({f"s{i}": n for i, n in enumerate(lengths)}, dtype=dtype),
        options,
        draw(st.sampled_from(["float32", "float16", "float64"])),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def spread(problem: Problem, mean: Any) -> Array:
    """Return a mean as a dense array, checking the order of a sparse one."""
    if not problem.sparse:
        return np.array(mean)
    indices, values = mean
    assert (np.diff(indices.astype(np.int64)) > 0).all()
    out = np.zeros(problem.layout.size, problem.layout.accumulator)
    out[indices] = values
    return out


def topk_follows_the_oracle(world: World, problem: Problem, steps: int = 3) -> None:
    expected = oracle.TopK(world.size, problem.segments, values=problem.values, **problem.options)
    for step in range(steps):
        numbers, gradients = problem.gradients(world.size, step)
        mean = spread(problem, world.step(gradients, problem.sparse))
        right = expected.step(numbers)
        np.testing.assert_array_equal(mean, right.astype(problem.layout.accumulator))
        np.testing.assert_array_equal(world.residuals(), expected.residuals)


def randomk_follows_the_oracle(world: World, problem: Problem, feedback: bool, steps: int = 3) -> None:
    """The entries are those of any other run with that seed; the rest follows from the definition."""
    layout, residuals = problem.layout, np.zeros((world.size, problem.layout.size))
    scheme = RandomK(seed=problem.seed, feedback=feedback, **problem.options)
    other = Simulated(1, layout, scheme, device="numpy")
    for step in range(steps):
        numbers, gradients = problem.gradients(world.size, step)
        indices = other.step(gradients[:1], sparse=True)[0].copy()
        mean = spread(problem, world.step(gradients, problem.sparse))
        accumulated = residuals + numbers if feedback else numbers
        right = np.zeros(layout.size)
        right[indices] = accumulated[:, indices].sum(axis=0) / world.size
        np.testing.assert_array_equal(mean, right.astype(layout.accumulator))
        if feedback:
            residuals = accumulated.copy()
            residuals[:, indices] = 0
            np.testing.assert_array_equal(world.residuals(), residuals)


def dense_is_the_mean(world: World, problem: Problem) -> None:
    numbers, gradients = problem.gradients(world.size, 0)
    mean = spread(problem, world.step(gradients, problem.sparse))
    right = numbers.sum(axis=0) / world.size
    np.testing.assert_array_equal(mean, right.astype(problem.layout.accumulator))


def schemes(problem: Problem) -> dict[str, mpitopk.Scheme]:
    return {
        "topk": TopK(values=problem.values, **problem.options),
        "randomk": RandomK(seed=problem.seed, **problem.options),
        "dense": mpitopk.Dense(),
    }


@contextmanager
def lockstep(comm: Any) -> Iterator[None]:
    """End all ranks when one fails: it would replay its example while the others go on to the next."""
    try:
        yield
    except Exception:
        sys.__stderr__.write(f"\nrank {comm.rank} of {comm.size}:\n{traceback.format_exc()}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
        comm.Abort(1)
