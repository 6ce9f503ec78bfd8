"""Momentum before the exchange: against its definition, and against dense SGD with momentum."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import oracle
import pytest
from worlds import LAYOUT, SEGMENTS, Array, Mpi, Simulated, whole

from mpitopk import DGC, Dense, MpiTopkError, Simulation, TopK, warmup

OPTIONS: dict[str, dict[str, Any]] = {
    "heavy ball": {"density": 0.05},
    "nesterov": {"density": 0.05, "nesterov": True},
    "unmasked": {"density": 0.05, "masking": False, "momentum": 0.5},
    "clipped": {"density": 0.05, "clip": 3.0},
    "nesterov, clipped": {"density": 0.1, "nesterov": True, "clip": 0.5},
    "per segment, small ones dense": {"density": 0.1, "per_segment": True, "dense_below": 8},
    "everything": {"density": 1.0},
    "float16": {"density": 0.1, "values": "float16", "dense_below": 20},
    "warm-up": {"density": warmup(0.01, 5)},
}
SIZES = [1, 2, 3, 4, 5, 7, 8, 64]
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
needs_mpi = pytest.mark.mpi
quiet = pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")


@each_option
@pytest.mark.parametrize("size", SIZES)
def test_follows_the_oracle(size: int, options: dict[str, Any], device: str) -> None:
    world = Simulated(size, LAYOUT, DGC(**options), device=device)
    bodies.follows(world, oracle.DGC(size, SEGMENTS, **options), 50 if size < 64 else 12)


@needs_mpi
@quiet
@each_option
def test_follows_the_oracle_on_real_ranks(comm: Any, options: dict[str, Any], device: str) -> None:
    world = Mpi(comm, LAYOUT, DGC(**options), device=device)
    bodies.follows(world, oracle.DGC(comm.size, SEGMENTS, **options))


@needs_mpi
@quiet
def test_a_rank_with_nan_stops_all_and_nothing_changes(comm: Any, device: str) -> None:
    gradients, error, match = bodies.broken_gradients(comm.size, comm.size - 1)["nan"]
    world = Mpi(comm, LAYOUT, DGC(0.1), device=device)
    bodies.fails_without_trace(world, gradients, error, match)


def momentum_sgd(gradients: Array, m: float, nesterov: bool) -> Array:
    """Updates of SGD with momentum on the mean gradients, in float64."""
    u, updates = np.zeros(gradients.shape[-1]), []
    for g in gradients.mean(axis=1, dtype=np.float64):
        u = m * (u + g) if nesterov else m * u + g
        updates.append(u + g if nesterov else u)
    return np.array(updates)


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_everything_is_dense_sgd_with_momentum(masking: bool, nesterov: bool) -> None:
    """With masking as well, which would make it plain SGD if it cleared the momentum of all entries."""
    gradients = np.array([whole(4, step) for step in range(20)])
    simulation = Simulation(4, LAYOUT, DGC(1.0, momentum=0.9, masking=masking, nesterov=nesterov))
    got = [simulation.allreduce(g).copy() for g in gradients]
    np.testing.assert_allclose(got, momentum_sgd(gradients, 0.9, nesterov), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masking", [False, True])
def test_velocity_is_conserved(masking: bool) -> None:
    """Sum of what was sent + velocity = sum of momenta, exactly: momentum 0.5 of whole numbers."""
    simulation = Simulation(1, LAYOUT, DGC(0.05, momentum=0.5, masking=masking))
    sent, momenta, u = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for step in range(8):
        g = whole(1, step)
        u = 0.5 * u + g[0]
        momenta += u
        sent += simulation.allreduce(g)
        (state,) = simulation.residuals
        np.testing.assert_array_equal(sent + state["residual"], momenta)
        u = state["momentum"].astype(np.float64)


def test_without_momentum_it_is_topk() -> None:
    ours, topk = (Simulation(3, LAYOUT, scheme) for scheme in (DGC(0.1, momentum=0), TopK(0.1)))
    for step in range(4):
        assert bodies.same(ours.allreduce(whole(3, step)), topk.allreduce(whole(3, step)))


def test_masking_clears_what_was_sent_and_nothing_else() -> None:
    simulation = Simulation(1, LAYOUT, DGC(0.1, dense_below=20))
    sent = np.flatnonzero(simulation.allreduce(whole(1, 0)))
    (state,) = simulation.residuals
    small = np.concatenate([np.arange(a, b) for a, b in SEGMENTS if b - a < 20])
    large = np.setdiff1d(sent, small)
    assert (state["momentum"][large] == 0).all()
    assert bodies.same(state["momentum"][small], whole(1, 0)[0][small])


def test_zeros_send_zeros() -> None:
    simulation = Simulation(2, LAYOUT, DGC(0.1, clip=1.0))
    assert not simulation.allreduce(np.zeros((2, LAYOUT.size), np.float32)).any()


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    runs = [Simulation(3, LAYOUT, DGC(0.1)) for _ in range(2)]
    for step in range(3):
        runs[0].allreduce(whole(3, step))
    runs[1].load_state_dicts(runs[0].state_dicts())
    for step in range(3, 6):
        one, other = (run.allreduce(whole(3, step)) for run in runs)
        assert bodies.same(one, other)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"momentum": 1}, "momentum is 1: give a number from 0"),
        ({"momentum": "0.9"}, "momentum is '0.9'"),
        ({"clip": 0}, "clip is 0: give a number above 0"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"momentun": 0.5}, "DGC has no option 'momentun'.*momentum"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(MpiTopkError, match=match):
        DGC(0.1, **options)


@pytest.mark.parametrize("arguments", [(0, 10), (0.1, 0), (0.1, 10, 1), (0.1, 2.5)])
def test_warmups_out_of_range(arguments: Any) -> None:
    with pytest.raises(MpiTopkError, match="give"):
        warmup(*arguments)


def test_it_moves_what_topk_moves() -> None:
    simulations = [Simulation(4, LAYOUT, scheme) for scheme in (DGC(0.05), TopK(0.05), Dense())]
    for simulation in simulations:
        simulation.allreduce(whole(4, 0))
    ours, topk, dense = (simulation.bytes for simulation in simulations)
    assert ours == topk < dense
