"""Merges of two at a time: who meets whom, what is kept, and that nobody is left waiting."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import oracle
import pytest
from devices import handed
from test_mpi import raises_together
from worlds import LAYOUT, SEGMENTS, Array, Mpi, Simulated, whole

from mpitopk import GTopK, Layout, MpiTopkError, Simulation, TopK
from mpitopk.butterfly import schedule
from mpitopk.costs import Network, butterfly_bytes
from mpitopk.errors import ConfigError, ExchangeError, NonFiniteError
from mpitopk.plan import entries
from mpitopk.wire import message_bytes

K = entries(0.05, LAYOUT.size)
RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 64]
quiet = pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")


@pytest.mark.parametrize("ranks", [*range(1, 34), 63, 64, 65])
def test_the_rounds_bring_every_message_to_every_rank_once(ranks: int) -> None:
    """And of those that merge the same two, one keeps what is dropped: P - 1 in all, as in a tree."""
    plans = [schedule(rank, ranks) for rank in range(ranks)]
    held = [{rank} for rank in range(ranks)]
    keepers: list[frozenset[int]] = []
    for now in zip(*plans, strict=True):
        before = [set(h) for h in held]
        merged = set()
        for rank, mine in enumerate(now):
            assert mine.to is None or now[mine.to].source == rank
            if mine.source is None:
                continue
            assert now[mine.source].to == rank
            theirs = before[mine.source]
            assert mine.merges == (not before[rank] & theirs)
            held[rank] = before[rank] | theirs
            if mine.merges:
                merged.add(frozenset(held[rank]))
                keepers += [frozenset(held[rank])] * mine.keeps
        assert merged <= set(keepers)
    assert all(h == set(range(ranks)) for h in held)
    assert len(keepers) == len(set(keepers)) == ranks - 1


def exact(ranks: int, step: int) -> Array:
    """Whole numbers whose sums can be divided by up to 8, 16 or 64 ranks without rounding."""
    return whole(ranks, step) * np.float32(420)


def lost(scheme: GTopK, ranks: int, steps: int = 12) -> Array:
    """Return what is missing from sent + residuals after some steps, entry by entry."""
    simulation = Simulation(ranks, LAYOUT, scheme)
    given, sent = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for step in range(steps):
        given += exact(ranks, step).sum(axis=0, dtype=np.float64)
        sent += ranks * simulation.allreduce(exact(ranks, step)).astype(np.float64)
    kept = sum(state["residual"].astype(np.float64) for state in simulation.residuals)
    missing: Array = given - sent - kept
    return missing


@pytest.mark.parametrize(
    "options", [{}, {"per_segment": True}, {"dense_below": 20}, {"per_segment": True, "dense_below": 8}]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_lost(ranks: int, options: dict[str, Any]) -> None:
    assert not lost(GTopK(0.05, **options), ranks).any()


def test_as_published_it_loses_from_four_ranks_on() -> None:
    for ranks in (1, 2):
        assert not lost(GTopK(0.05, conserving=False), ranks).any()
    assert lost(GTopK(0.05, conserving=False), 4).any()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_holds_k_entries_however_many_ranks(ranks: int, device: str) -> None:
    world = Simulated(ranks, LAYOUT, GTopK(0.05), device=device)
    for step in range(3):
        indices, values = world.step(whole(ranks, step), sparse=True)
        assert indices.size == values.size == K
        assert (np.diff(indices.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("conserving", [True, False])
def test_one_rank_makes_it_topk_to_the_bit(device: str, conserving: bool) -> None:
    options = {"per_segment": True, "dense_below": 8}
    ours, topk = (
        Simulated(1, LAYOUT, scheme, device=device)
        for scheme in (GTopK(0.1, conserving=conserving, **options), TopK(0.1, **options))  # type: ignore[arg-type]
    )
    for step in range(5):
        g = np.random.default_rng(step).standard_normal((1, LAYOUT.size)).astype(np.float32)
        assert bodies.same(ours.step(g), topk.step(g))
        assert bodies.same(ours.residuals()[0], topk.residuals()[0])


@pytest.mark.parametrize("conserving", [True, False])
def test_of_two_ranks_the_largest_of_the_sum_win(conserving: bool) -> None:
    ours = Simulation(2, LAYOUT, GTopK(0.05, conserving=conserving))
    g = np.random.default_rng(1).integers(-1000, 1000, (2, LAYOUT.size)).astype(np.float32)
    total = np.zeros(LAYOUT.size)
    for a in g:
        at = oracle.largest(a, K)
        total[at] += a[at]
    at = oracle.largest(total, K)
    expected = np.zeros(LAYOUT.size)
    expected[at] = total[at] / 2
    np.testing.assert_array_equal(ours.allreduce(g), expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_and_time_are_those_of_the_rounds(ranks: int) -> None:
    simulation = Simulation(ranks, LAYOUT, GTopK(0.05), network=Network(1.0, 1e3))
    simulation.allreduce(whole(ranks, 0))
    doublings = int(np.log2(ranks))
    excess = ranks > 2**doublings
    size = message_bytes(K, 0, 4)
    assert simulation.bytes == size * (doublings + excess) == butterfly_bytes(size, ranks, 0)
    assert simulation.clock == pytest.approx((doublings + 2 * excess) * (1 + size / 1e3))
    received = [butterfly_bytes(size, ranks, rank) for rank in range(ranks)]
    assert sum(received) == size * (2**doublings * doublings + 2 * (ranks - 2**doublings))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["zeros", "constant", "ties", "huge"])
def test_degenerate_gradients(kind: str, ranks: int, device: str) -> None:
    n = 40
    g = {
        "zeros": np.zeros((ranks, n)),
        "constant": np.full((ranks, n), 2.0),
        "ties": np.tile([3.0, -3.0, 0, 1], (ranks, n // 4)),
        "huge": np.tile([1e28, 1.0], (ranks, n // 2)) * np.arange(1, n + 1) / n / ranks,
    }[kind].astype(np.float32)
    world = Simulated(ranks, Layout({"w": n}), GTopK(0.1), device=device)
    expected = oracle.GTopK(ranks, [(0, n)], density=0.1)
    for _ in range(3):
        mean, right = world.step(g), expected.step(g)
        np.testing.assert_allclose(mean, right, rtol=1e-6)
        near = 1e-6 * float(np.abs(g).max())
        np.testing.assert_allclose(world.residuals(), expected.residuals, rtol=1e-6, atol=near)


def test_one_entry_and_none(device: str) -> None:
    for layout in (Layout({"w": 1}), Layout({"none": 0})):
        world = Simulated(3, layout, GTopK(0.5), device=device)
        np.testing.assert_array_equal(world.step(np.full((3, layout.size), 3, np.float32)), [3] * layout.size)


@pytest.mark.parametrize("where", [5, 125], ids=["in a group", "dense"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_sum_that_is_too_large_stops_all(ranks: int, where: int, device: str) -> None:
    world = Simulated(ranks, LAYOUT, GTopK(0.05, dense_below=20), device=device)
    g = whole(ranks, 0)
    g[0, where] = g[-1, where] = 7e28
    bodies.fails_without_trace(world, g, NonFiniteError, "every gradient is finite, but .* too large")


def test_switches_take_no_text() -> None:
    with pytest.raises(MpiTopkError, match="conserving is 'no': give True or False"):
        GTopK(0.1, conserving="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="GTopK has no option 'values'"):
        GTopK(0.1, values="float16")  # type: ignore[call-arg]


@pytest.mark.mpi
@quiet
@pytest.mark.parametrize("density", [0.1, lambda _: 0.1], ids=["fixed", "schedule"])
@pytest.mark.parametrize("what", ["nan", "inf", "size", "none"])
def test_a_wrong_gradient_on_any_rank_stops_all(comm: Any, density: Any, what: str, device: str) -> None:
    world = Mpi(comm, LAYOUT, GTopK(density), device=device)
    for rank in range(comm.size):
        bodies.fails_without_trace(world, *bodies.broken_gradients(comm.size, rank)[what])


@pytest.mark.mpi
@quiet
def test_wrong_gradients_on_several_ranks_are_all_named(comm: Any, device: str) -> None:
    world, gradients = Mpi(comm, LAYOUT, GTopK(0.1), device=device), list(whole(comm.size, 0))
    for rank in range(0, comm.size, 2):
        gradients[rank] = None  # type: ignore[call-overload]
    match = "; ".join(f"rank {rank}: .*NoneType.*" for rank in range(0, comm.size, 2))
    bodies.fails_without_trace(world, gradients, MpiTopkError, match)


@pytest.mark.mpi
@quiet
def test_a_rank_out_of_step_stops_all(comm: Any, device: str) -> None:
    """Those that meet it notice, and tell the others."""
    if comm.size == 1:
        return
    world, mine = Mpi(comm, LAYOUT, GTopK(0.1), device=device), handed(device, whole(comm.size, 0)[comm.rank])
    before = world.residuals()
    for rank in range(comm.size):
        me = world.runtime._participant.rank
        me.step += 5 * (comm.rank == rank)
        raises_together(
            comm, ExchangeError, r"has step \d, expected \d", lambda: world.runtime.allreduce(mine)
        )
        me.step -= 5 * (comm.rank == rank)
        assert all(map(bodies.same, before, world.residuals()))
    world.step(whole(comm.size, 0))


@pytest.mark.mpi
@quiet
@pytest.mark.parametrize(
    ("other", "match"),
    [(0.5, "give all the same density"), (4 / 187, "has [34] entries, that of rank . [34]: give all")],
    ids=["other sizes", "equal sizes"],
)
def test_schedules_that_differ_fail_together(comm: Any, other: float, match: str, device: str) -> None:
    """Three entries take as many bytes as four."""
    layout, usual = Layout({"w": 187}), 3 / 187
    for rank in range(comm.size if comm.size > 1 else 0):
        mine = other if comm.rank == rank else usual
        runtime = Mpi(comm, layout, GTopK(lambda step, d=mine: d if step else 0.1), device=device).runtime  # type: ignore[misc]
        gradient = handed(device, whole(comm.size, 0, layout)[comm.rank])
        runtime.allreduce(gradient)
        raises_together(comm, ConfigError, match, lambda r=runtime, g=gradient: r.allreduce(g))


@pytest.mark.mpi
@quiet
def test_messages_go_in_pieces_below_the_limit(comm: Any, device: str) -> None:
    options = {"density": 0.1, "dense_below": 20}
    world = Mpi(comm, LAYOUT, GTopK(**options), device=device, limit=comm.size + 60)  # type: ignore[arg-type]
    bodies.follows(world, oracle.GTopK(comm.size, SEGMENTS, **options), 4)


@pytest.mark.mpi
@quiet
def test_metrics_count_what_is_received(comm: Any) -> None:
    world = Mpi(comm, LAYOUT, GTopK(0.05))
    for step in range(3):
        world.step(whole(comm.size, step))
    metrics = world.runtime.metrics
    assert metrics.bytes == 3 * butterfly_bytes(message_bytes(K, 0, 4), comm.size, comm.rank)
    assert metrics.density == metrics.union == K / LAYOUT.size
    if comm.size > 1:
        seconds = metrics.seconds
        assert {"exchange", "wait", "transfer", "merge"} <= set(seconds)
        assert seconds["wait"] + seconds["transfer"] <= seconds["exchange"]


@pytest.mark.mpi
@quiet
@pytest.mark.parametrize("turn", [0, -1])
def test_a_merge_that_fails_leaves_nobody_waiting(
    comm: Any, turn: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has it fail says so; who hears of it in a later round fails too; others cannot be told."""
    runtime = Mpi(comm, LAYOUT, GTopK(0.1), device=device).runtime
    before, mine = runtime.state_dict(), handed(device, whole(comm.size, 0)[comm.rank])
    merging = [rank for rank in range(comm.size) if any(now.merges for now in schedule(rank, comm.size))]
    if not merging:
        return
    plans = [schedule(rank, comm.size) for rank in range(comm.size)]
    victim = merging[0]  # which also has the last rank's result, unless their number is a power of two
    at = [i for i, now in enumerate(plans[victim]) if now.merges][turn]
    told = {victim}
    for i in range(at + 1, len(plans[0])):
        told |= {rank for rank in range(comm.size) if plans[rank][i].source in told}
    on, merges = (
        runtime._participant.rank.device,
        iter(i for i, now in enumerate(plans[victim]) if now.merges),
    )
    combine = on.combine

    def fails(*arguments: Any) -> Any:
        if comm.rank == victim and next(merges) == at:
            raise MemoryError("there is none")
        return combine(*arguments)

    monkeypatch.setattr(on, "combine", fails)
    if comm.rank in told:
        match = "rank 0: MemoryError: there is none" if comm.rank == victim else "failed on another rank"
        with pytest.raises(ExchangeError, match=match):
            runtime.allreduce(mine)
        assert all(map(bodies.same, before.values(), runtime.state_dict().values()))
    else:
        runtime.allreduce(mine)
