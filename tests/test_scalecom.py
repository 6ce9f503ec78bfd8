"""One rank by turns chooses for all: what that keeps and what it saves."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from worlds import LAYOUT, Mpi, Simulated, whole

from mpitopk import MpiTopkError, ScaleCom, Simulation, TopK
from mpitopk.errors import ConfigError, NonFiniteError
from mpitopk.plan import entries
from mpitopk.wire import HEADER, message_bytes


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
@pytest.mark.parametrize("longer", [0, -1])
def test_schedules_that_differ_fail_together(comm: Any, device: str, longer: int) -> None:
    """Whether the leader sends more indices than the others expect, or fewer."""
    if comm.size > 1:
        mine = 0.5 if comm.rank == longer % comm.size else 0.1
        world = Mpi(comm, LAYOUT, ScaleCom(lambda step: mine if step else 0.1), device=device)
        world.step(whole(comm.size, 0))
        before = world.residuals()
        with pytest.raises(ConfigError, match="give all the same density"):
            world.step(whole(comm.size, 1))
        assert all(map(bodies.same, before, world.residuals()))


@pytest.mark.parametrize("beta", [1, 0.25])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_nothing_is_lost(size: int, beta: float) -> None:
    """Sum of what was sent + memory / beta = sum of gradients: exactly, where the arithmetic is."""
    simulation = Simulation(size, LAYOUT, ScaleCom(0.05, beta=beta))
    sent, given = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for step in range(5):
        g = whole(size, step)
        given += g.sum(axis=0)
        sent += size * simulation.allreduce(g).astype(np.float64)
        kept = sum(state["residual"].astype(np.float64) for state in simulation.residuals)
        np.testing.assert_array_equal(sent + kept / beta, given)


def test_equal_gradients_make_it_topk() -> None:
    ours, topk = (Simulation(4, LAYOUT, scheme) for scheme in (ScaleCom(0.1), TopK(0.1)))
    for step in range(6):
        g = np.repeat(whole(1, step), 4, axis=0)
        assert bodies.same(ours.allreduce(g), topk.allreduce(g))


@pytest.mark.parametrize("size", [2, 8, 64])
def test_no_indices_build_up(size: int) -> None:
    """The mean holds k entries, and rank 0 receives two headers, k indices if it follows, and k values."""
    simulation = Simulation(size, LAYOUT, ScaleCom(0.05))
    k = entries(0.05, LAYOUT.size)
    for step in range(3):
        before = simulation.bytes
        assert np.count_nonzero(simulation.allreduce(whole(size, step))) <= k
        headers = (size - 1) * HEADER.size
        indices = 0 if step % size == 0 else message_bytes(k, 0, 0) - HEADER.size
        assert simulation.bytes - before == headers + indices + 2 * 4 * k * (size - 1) // size


def test_every_rank_leads() -> None:
    """A rank's only large entry is sent within as many steps as there are ranks."""
    simulation = Simulation(5, LAYOUT, ScaleCom(1e-9))
    g = np.zeros((5, LAYOUT.size), np.float32)
    for rank in range(5):
        g[rank, 10 * rank + 1] = 1000
    seen = [int(np.argmax(simulation.allreduce(g if step == 0 else 0 * g))) for step in range(5)]
    assert seen == [1, 11, 21, 31, 41]


def test_a_leader_without_a_gradient_loses_nothing(device: str) -> None:
    world = Simulated(3, LAYOUT, ScaleCom(0.1), device=device)
    g = whole(3, 0)
    g[0] = 0
    mean = world.step(g)
    np.testing.assert_array_equal(3 * mean + np.sum(world.residuals(), axis=0), g.sum(axis=0))


def test_not_finite_on_a_follower_is_known_before_indices_are_used(device: str) -> None:
    g = whole(3, 0)
    g[2, 5] = np.inf
    bodies.fails_without_trace(
        Simulated(3, LAYOUT, ScaleCom(0.1), device=device), g, NonFiniteError, "rank 2: .*segment 'w'"
    )


@pytest.mark.parametrize("beta", [0, 1.5, -1, "1"])
def test_beta_out_of_range(beta: Any) -> None:
    with pytest.raises(MpiTopkError, match=r"beta is .*: give a number above 0 and up to 1"):
        ScaleCom(0.1, beta=beta)
