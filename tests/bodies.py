"""What must hold of any ranks, simulated or real; see `worlds`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import oracle
import pytest
from worlds import LAYOUT, SEGMENTS, Array, whole

import mpitopk

TOPK: dict[str, dict[str, Any]] = {
    "whole buffer": {"density": 0.05},
    "one entry": {"density": 1e-9},
    "everything": {"density": 1.0},
    "per segment": {"density": 0.1, "per_segment": True},
    "small ones dense": {"density": 0.1, "dense_below": 20},
    "per segment, small ones dense": {"density": 0.1, "per_segment": True, "dense_below": 8},
    "all dense": {"density": 0.1, "dense_below": 1000},
    "schedule": {"density": lambda step: 0.2 / (step + 1)},
    "float16": {"density": 0.1, "values": "float16", "dense_below": 20},
}


def same(a: Any, b: Any) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def follows_the_oracle(world: Any, options: dict[str, Any], steps: int = 5) -> None:
    """Mean and residuals are those of the definition, in every step."""
    expected = oracle.TopK(world.size, SEGMENTS, **options)
    for step in range(steps):
        gradients = whole(world.size, step)
        mean = world.step(gradients)
        np.testing.assert_array_equal(mean, expected.step(gradients).astype(np.float32))
        np.testing.assert_array_equal(world.residuals(), expected.residuals)


def follows(world: Any, expected: Any, steps: int = 50) -> None:
    """Mean and residuals are those of an oracle to rounding, for gradients of any numbers."""
    near = {"rtol": 2e-4, "atol": 2e-4} if expected.values == np.float32 else {"rtol": 2e-3, "atol": 2e-2}
    for step in range(steps):
        rng = np.random.default_rng((world.size, step, 7))
        gradients = rng.standard_normal((world.size, LAYOUT.size)).astype(np.float32)
        np.testing.assert_allclose(world.step(gradients), expected.step(gradients), **near)
    np.testing.assert_allclose(world.residuals(), expected.residuals, **near)


def conserves(world: Any, steps: int = 4) -> None:
    """Ranks x mean + new residuals = gradients + old residuals, exactly where P is a power of two."""
    old = np.sum(world.residuals(), axis=0, dtype=np.float64)
    for step in range(steps):
        gradients = whole(world.size, 10 + step)
        mean = world.step(gradients).astype(np.float64)
        new = np.sum(world.residuals(), axis=0, dtype=np.float64)
        left, right = world.size * mean + new, gradients.sum(axis=0, dtype=np.float64) + old
        if world.size & (world.size - 1) == 0:
            np.testing.assert_array_equal(left, right)
        else:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-3)
        old = new


def sparse_is_dense(world: Any, other: Any) -> None:
    """The entries of a sparse mean are the non-trivial ones of the dense mean, ascending."""
    for step in range(3):
        gradients = whole(world.size, step)
        mean = world.step(gradients).copy()
        indices, values = other.step(gradients, sparse=True)
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        spread = np.zeros_like(mean)
        spread[indices] = values
        assert same(spread, mean)


def fails_without_trace(world: Any, broken: Any, error: type[Exception], match: str) -> None:
    """A step that fails raises the same everywhere, changes nothing, and the next one works."""
    world.step(whole(world.size, 0))
    before, steps = world.residuals(), world.steps()
    with pytest.raises(error, match=match) as raised:
        world.step(broken)
    assert isinstance(raised.value, mpitopk.MpiTopkError)
    assert world.steps() == steps
    assert all(same(a, b) for a, b in zip(before, world.residuals(), strict=True))
    if hasattr(world, "comm"):
        assert len(set(world.comm.allgather(str(raised.value)))) == 1
    world.step(whole(world.size, 1))
    assert world.steps() == steps + 1


def broken_gradients(size: int, rank: int) -> dict[str, tuple[Any, type[Exception], str]]:
    """Gradients of all ranks of which one is wrong: the error that it causes, and what its text says."""
    from mpitopk.errors import GradientError, NonFiniteError

    def put(bad: Any) -> Any:
        gradients: list[Any] = list(whole(size, 5))
        gradients[rank] = bad(gradients[rank])
        return gradients

    def with_entry(value: float) -> Any:
        def change(g: Array) -> Array:
            g[125] = value
            return g

        return change

    n = LAYOUT.size
    return {
        "nan": (put(with_entry(np.nan)), NonFiniteError, f"rank {rank}: .*NaN or Inf in segment 'b'"),
        "inf": (put(with_entry(-np.inf)), NonFiniteError, f"rank {rank}"),
        "size": (put(lambda g: g[1:]), GradientError, f"rank {rank}: expected .*{n} entries, got {n - 1}"),
        "dtype": (put(lambda g: g.astype(np.int32)), GradientError, f"rank {rank}: .*float32, got int32"),
        "2-D": (put(lambda g: g.reshape(2, -1)), GradientError, f"rank {rank}: .*one dimension"),
        "stride": (put(lambda g: np.repeat(g, 2)[::2]), GradientError, f"rank {rank}: .*contiguous"),
        "list": (put(list), GradientError, f"rank {rank}: .*cannot be viewed"),
        "none": (put(lambda _: None), GradientError, f"rank {rank}: .*NoneType"),
        "gpu": (put(lambda _: OnGpu()), GradientError, f"rank {rank}: .*on a GPU"),
    }


class OnGpu:
    """What CuPy and PyTorch arrays on a GPU look like."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}
