"""One rank by turns chooses for all: what that keeps and what it saves."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from devices import opened
from worlds import LAYOUT, Mpi, Simulated, whole

from mpitopk import Layout, MpiTopkError, ScaleCom, Simulation, TopK
from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ConfigError, NonFiniteError
from mpitopk.plan import entries, make_chunk_plan
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


def test_the_largest_of_every_chunk_is_sent(device: str) -> None:
    """Of equal ones the first; the last chunk is shorter; zeros, too; as many bytes as k entries take."""
    world = Simulated(2, Layout({"w": 11}), ScaleCom(chunk=4), device=device)
    g = np.array([[1, -2, 2, 0, 0, 0, 0, 0, 5, 5, -7], [8] * 11], np.float32)
    indices, values = world.step(g, sparse=True)
    assert indices.tolist() == [1, 4, 10]
    assert values.tolist() == [3, 4, 0.5]
    assert world.simulation.bytes == HEADER.size + 2 * 4 * 3 // 2
    bodies.conserves(Simulated(4, LAYOUT, ScaleCom(chunk=7), device=device))


@pytest.mark.parametrize("chunk", [1, 2, 5, 33, 4096, 5000])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_of_many_entries_are_as_the_reference_says(device: str, chunk: int, threads: int) -> None:
    """Across pieces, tiles and threads; with many ties."""
    lengths = [5, 4097, 3, 60_001, 700, 2, 9000, 64, 4095]
    layout = Layout({str(i): n for i, n in enumerate(lengths)})
    x = np.random.default_rng(chunk).integers(-20, 21, layout.size).astype(np.float32)
    for per_segment, below in (False, 0), (False, 100), (True, 100):
        plan = make_chunk_plan(layout, chunk, per_segment=per_segment, dense_below=below)
        found, right = np.zeros(plan.total, np.uint32), np.zeros(plan.total, np.uint32)
        opened(device, threads).chunk_maxima(x, plan, chunk, found)
        ReferenceDevice().chunk_maxima(x, plan, chunk, right)
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "density is None and chunk is None: give one of them"),
        ({"density": 0.1, "chunk": 10}, "density is 0.1 and chunk is 10: give one of them"),
        ({"chunk": 0}, "chunk is 0: give a whole number from 1"),
        ({"chunk": 2.5}, "chunk is 2.5"),
    ],
)
def test_a_density_or_chunks(options: dict[str, Any], match: str) -> None:
    with pytest.raises(MpiTopkError, match=match):
        ScaleCom(**options)


@pytest.mark.parametrize("beta", [0, 1.5, -1, "1"])
def test_beta_out_of_range(beta: Any) -> None:
    with pytest.raises(MpiTopkError, match=r"beta is .*: give a number above 0 and up to 1"):
        ScaleCom(0.1, beta=beta)
