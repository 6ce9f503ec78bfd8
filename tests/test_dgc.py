"""Momentum before the exchange, against dense SGD with momentum."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from worlds import LAYOUT, SEGMENTS, Array, whole

from mpitopk import DGC, Dense, MpiTopkError, Simulation, TopK, warmup


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
@pytest.mark.parametrize("selector", ["exact", "sampled"])
def test_velocity_is_conserved(masking: bool, selector: str) -> None:
    """Sum of what was sent + velocity = sum of momenta, exactly: momentum 0.5 of whole numbers."""
    simulation = Simulation(1, LAYOUT, DGC(0.05, momentum=0.5, masking=masking, selector=selector))
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


@pytest.mark.parametrize("selector", ["exact", "sampled"])
def test_zeros_send_zeros(selector: str) -> None:
    simulation = Simulation(2, LAYOUT, DGC(0.1, clip=1.0, selector=selector))
    assert not simulation.allreduce(np.zeros((2, LAYOUT.size), np.float32)).any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"momentum": 1}, "momentum is 1: give a number from 0"),
        ({"momentum": "0.9"}, "momentum is '0.9'"),
        ({"clip": 0}, "clip is 0: give a number above 0"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"nesterov": "false"}, "nesterov is 'false': give True or False"),
        ({"per_segment": 1}, "per_segment is 1: give True or False"),
        ({"selector": "sample"}, "selector is 'sample'.*sampled"),
        ({"selector": "sampled", "per_segment": True}, "per_segment is True: give False"),
        ({"seed": -1}, "seed is -1: give a whole number from 0"),
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
