"""Levels that adapt: where they go, that all ranks have them, and that nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import bodies
import numpy as np
import pytest
from devices import got
from hypothesis import given, settings
from hypothesis import strategies as st
from test_qsgd import draws, normal, without_bias
from worlds import LAYOUT, Array, Mpi, Simulated, whole

from mpitopk import ALQ, QSGD, Layout, Simulation, make_scheme
from mpitopk import levels as solver
from mpitopk.costs import allreduce_bytes
from mpitopk.errors import ConfigError, NonFiniteError, StateError
from mpitopk.schemes.alq import BINS
from mpitopk.wire import HEADER

FORMS = ["alq", "alq-gradient", "amq"]
NORMALS = [solver.Normal(0.0, 0.011), solver.Normal(0.3, 0.2), solver.Normal(-2.0, 0.5)]
some_counts = st.lists(st.one_of(st.just(0), st.integers(0, 1000)), min_size=192, max_size=192)
histograms = some_counts.filter(any).map(solver.Histogram)
densities = st.one_of(histograms, st.sampled_from(NORMALS))
tables = st.lists(st.floats(1e-4, 0.999), min_size=1, max_size=15, unique=True).map(
    lambda inner: [0.0, *sorted(inner), 1.0]
)
few = settings(max_examples=40, deadline=None)


def heights(density: solver.Density, count: int = 40_000) -> tuple[Array, Array]:
    """Return midpoints and the probability around each, on a grid that is finer towards 0."""
    edges = np.concatenate([[0], np.geomspace(1e-7, 1, count)])
    parts = [density.moments(a, b)[0] for a, b in pairwise(edges.tolist())]
    return (edges[1:] + edges[:-1]) / 2, np.array(parts)


@pytest.mark.parametrize("density", [*NORMALS, solver.Histogram(range(192))])
def test_expected_variance_is_the_integral(density: solver.Density) -> None:
    r, part = heights(density)
    assert part.sum() == pytest.approx(1)
    for levels in ([0.0, 1.0], [0, 0.01, 0.1, 1], [0, 0.25, 0.5, 0.75, 1]):
        above = np.searchsorted(levels, r)
        low, high = np.array(levels)[above - 1], np.array(levels)[above]
        expected = np.sum((high - r) * (r - low) * part)
        assert solver.expected_variance(density, levels) == pytest.approx(expected, rel=1e-3)


@few
@given(densities, tables)
def test_a_level_goes_to_where_the_variance_is_least(density: solver.Density, levels: list[float]) -> None:
    for j in range(1, len(levels) - 1):
        low, high = levels[j - 1], levels[j + 1]
        best = solver.optimum(density, low, high, levels[j])
        assert low < best < high
        least = solver.expected_variance(density, [low, best, high])
        for other in np.linspace(low, high, 23).tolist():
            assert least <= solver.expected_variance(density, [low, other, high]) + 1e-12


@few
@given(densities, tables)
def test_the_variance_falls_with_every_sweep(density: solver.Density, levels: list[float]) -> None:
    for step in (lambda x: solver.descend(density, x, 1), lambda x: solver.follow_slope(density, x, 1)):
        now = levels
        for _ in range(6):
            last, now = now, step(now)
            less, more = (solver.expected_variance(density, x) for x in (now, last))
            assert less <= more + 1e-12
            assert now[0] == 0
            assert now[-1] == 1
            assert now == sorted(now)


@few
@given(densities, tables)
def test_adapted_levels_are_the_best_of_all(density: solver.Density, last: list[float]) -> None:
    top = len(last) - 1
    variances = [solver.expected_variance(density, solver.adapted(density, last, form)) for form in FORMS]
    uniform = [j / top for j in range(top + 1)]
    others = [solver.expected_variance(density, levels) for levels in (last, uniform)]
    alq, gradient, amq = variances
    assert max(alq, gradient) <= min(amq, *others) + 1e-12
    assert amq <= solver.expected_variance(density, solver.powers(0.5, top)) + 1e-12


@few
@given(densities, tables)
def test_slopes_are_derivatives(density: solver.Density, levels: list[float]) -> None:
    for j, slope in enumerate(solver.slopes(density, levels), 1):
        by = 1e-3 * min(levels[j] - levels[j - 1], levels[j + 1] - levels[j])
        more, less = ([*levels[:j], levels[j] + d, *levels[j + 1 :]] for d in (by, -by))
        rise = solver.expected_variance(density, more) - solver.expected_variance(density, less)
        assert slope == pytest.approx(
            rise / (2 * by), rel=0.02, abs=1e-13 / by + 1e-4 * density.moments(0, 1)[0]
        )


def test_figures_of_a_narrow_normal_distribution() -> None:
    """Four magnitudes, sigma = 1 / sqrt(8192): the variance falls to a fiftieth within a few sweeps."""
    density, start = solver.Normal(0.0, 0.011), solver.powers(0.5, 4)
    ends = [solver.descend(density, x) for x in (start, [j / 4 for j in range(5)])]
    variances = [solver.expected_variance(density, x) for x in ends]
    assert variances[0] == pytest.approx(variances[1], rel=0.01)
    assert variances[0] < solver.expected_variance(density, start) / 40


def test_flat_densities_leave_levels_where_they_are() -> None:
    counts = [0.0] * 192
    counts[100] = 7
    density, levels = solver.Histogram(counts), [0.0, 0.5, 0.75, 1.0]
    assert solver.optimum(density, 0.5, 1.0, 0.75) == 0.75
    assert solver.expected_variance(density, solver.descend(density, levels)) < 1e-6
    assert solver.fitted([0] * 192 + [5, 0], False) is None
    assert solver.fitted(counts, True) is not None


def test_a_count_of_rare_large_entries_beats_the_normal_distribution() -> None:
    """The reason for the default: ratios of a heavy tail, and what rounding them really costs."""
    x = np.random.default_rng(0).standard_t(3, 40 * 8192).astype(np.float32)
    costs = {}
    for fit in ("histogram", "normal"):
        scheme = ALQ(bits=4, fit=fit, update_steps=(0,))
        simulation = Simulation(1, Layout({"w": x.size}), scheme)
        costs[fit] = float(np.mean((simulation.allreduce([x]) - x) ** 2))
    unadapted = Simulation(1, Layout({"w": x.size}), ALQ(bits=4, update_steps=()))
    start = float(np.mean((unadapted.allreduce([x]) - x) ** 2))
    assert costs["histogram"] < start / 2
    assert costs["histogram"] < costs["normal"] / 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_unbiased(form: str, norm: str) -> None:
    scheme = ALQ(form=form, norm=norm, bucket=128, update_steps=(0, 100))
    assert 0.8 < without_bias(scheme) < 1.2


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_variance_is_that_of_the_levels(norm: str) -> None:
    """Over many draws it is the sum of (high - r) (r - low), times the square of the scale."""
    g = normal(512).astype(np.float64)
    found = draws(ALQ(bucket=512, norm=norm, update_steps=()), g.astype(np.float32), 400)
    scale = np.abs(g).max() if norm == "max" else np.linalg.norm(g)
    r, levels = np.abs(g) / scale, np.array([0, 0.25, 0.5, 1])
    above = np.minimum(np.searchsorted(levels, r, side="right"), 3)
    expected = np.sum((levels[above] - r) * (r - levels[above - 1])) * scale**2
    assert np.mean(np.sum((found - g) ** 2, axis=1)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_uniform_levels_that_stay_are_qsgd(bits: int, norm: str, device: str) -> None:
    common: dict[str, Any] = {"bits": bits, "bucket": 64, "norm": norm, "seed": 4}
    still = ALQ(start="uniform", update_steps=(), update_every=0, **common)
    worlds = [Simulated(3, LAYOUT, scheme, device=device) for scheme in (still, QSGD(**common))]
    for step in range(3):
        assert bodies.same(*(world.step(whole(3, step)) for world in worlds))


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_adapt_alike_and_send_their_levels(form: str, device: str) -> None:
    world = Simulated(4, LAYOUT, ALQ(bits=4, form=form, bucket=64, update_steps=(1,)), device=device)
    seen = []
    for step in range(3):
        world.step(whole(4, step))
        states: list[Any] = [p.state for p in world.simulation.participants]
        assert len({got(state.levels).tobytes() for state in states}) == 1
        assert all(bodies.same(got(state.levels), got(state.levels_sent)) for state in states)
        levels = got(states[0].levels).copy()
        assert levels[0] == 0
        assert levels[-1] == 1
        assert (np.diff(levels) > 0).all()
        seen.append(levels.tolist())
    assert seen[0] == [0, *(0.5**j for j in range(6, -1, -1))]
    assert seen[0] != seen[1] == seen[2]


def test_levels_that_differ_between_ranks_are_decoded_as_meant() -> None:
    simulation = Simulation(2, Layout({"w": 64}), ALQ(bucket=64, norm="max", update_steps=()))
    state: Any = simulation.participants[1].state
    state.levels[:] = 0, 0.1, 0.3, 1
    g = np.tile(np.array([1, 0.5, 0.25, 0], np.float32), 16)
    other = np.tile(np.array([1, 0.1, 0.3, 0], np.float32), 16)
    np.testing.assert_allclose(simulation.allreduce([g, other]), (g + other) / 2, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_bytes(size: int) -> None:
    """A header, scales, 4 levels, 3 words for every 32 entries; to adapt, an allreduce of counts."""
    n, bucket = 5000, 128
    simulation = Simulation(size, Layout({"w": n}), ALQ(bucket=bucket, update_steps=(1,)))
    words = -(-n // bucket) + 4 + 3 * -(-n // 32)
    before = 0
    for step in range(3):
        simulation.allreduce(np.ones((size, n), np.float32))
        counts = allreduce_bytes(4 * BINS, size) if step == 1 else 0
        assert simulation.bytes - before == (size - 1) * (HEADER.size + -(-words // 2) * 8) + counts
        before = simulation.bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_its_levels(form: str, device: str) -> None:
    scheme = ALQ(form=form, bucket=64, update_steps=(2, 5))
    runs = [Simulated(3, LAYOUT, scheme, device=device) for _ in range(2)]
    for step in range(4):
        runs[0].step(whole(3, step))
    states = runs[0].simulation.state_dicts()
    runs[1].simulation.load_state_dicts(states)
    for step in range(4, 8):
        assert bodies.same(*(run.step(whole(3, step)) for run in runs))
    for ranks in (1, 2, 7):
        other = Simulated(ranks, LAYOUT, scheme, device=device)
        other.simulation.load_state_dicts(states)
        for participant in other.simulation.participants:
            assert bodies.same(got(participant.state.shared["levels"]), states[0]["shared/levels"])
        other.step(whole(ranks, 0))
        assert other.steps() == 5


def test_states_without_levels_are_refused() -> None:
    simulation = Simulation(2, LAYOUT, ALQ())
    states = simulation.state_dicts()
    for broken, match in (
        ({k: v for k, v in states[0].items() if k != "shared/levels"}, "lacks 'shared/levels'"),
        (states[0] | {"shared/levels": np.full(4, np.nan, np.float32)}, "NaN or Inf"),
        (states[0] | {"shared/levels": np.zeros(8, np.float32)}, r"float32 \(8,\), expected float32 \(4,\)"),
    ):
        with pytest.raises(StateError, match=match):
            simulation.load_state_dicts([broken, states[1]])
    with pytest.raises(StateError, match="scheme ALQ"):
        Simulation(2, LAYOUT, QSGD()).load_state_dicts(states)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("form", FORMS)
def test_constant_gradients_when_levels_adapt(value: float, form: str, device: str) -> None:
    world = Simulated(2, LAYOUT, ALQ(form=form, norm="max", update_steps=(0,)), device=device)
    g = np.full((2, LAYOUT.size), value, np.float32)
    np.testing.assert_array_equal(world.step(g), g[0])
    levels = got(world.simulation.participants[0].state.shared["levels"])
    assert levels.tolist() == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize("n", [0, 1, 2, 64, 128])
@pytest.mark.parametrize("fit", ["histogram", "normal"])
def test_small_buffers(n: int, fit: str, device: str) -> None:
    """Shorter than a bucket, or all of whole buckets."""
    world = Simulated(3, Layout({"w": n}), ALQ(fit=fit, bucket=64, update_steps=(0, 1)), device=device)
    for step in range(3):
        mean = world.step(np.random.default_rng(step).standard_normal((3, n)).astype(np.float32))
        assert mean.size == n
        assert np.isfinite(mean).all()


@pytest.mark.parametrize("bits", [2, 8])
def test_few_and_many_levels(bits: int) -> None:
    simulation = Simulation(2, LAYOUT, ALQ(bits=bits, update_steps=(0,)))
    assert np.isfinite(simulation.allreduce(whole(2, 0))).all()
    levels = simulation.participants[0].state.shared["levels"]
    assert levels.size == 2 ** (bits - 1)
    assert (np.diff(levels) >= 0).all()
    assert levels[0] == 0
    assert levels[-1] == 1


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_failed_step_leaves_no_trace(step: int, bad: float, device: str) -> None:
    """Neither when levels adapt nor later."""
    world = Simulated(3, LAYOUT, ALQ(update_steps=(1,)), device=device)
    other = Simulated(3, LAYOUT, ALQ(update_steps=(1,)), device=device)
    for i in range(4):
        if i == step:
            broken = whole(3, i)
            broken[2, 125] = bad
            with pytest.raises(NonFiniteError, match=r"rank 2: .*NaN or Inf in segment 'b'"):
                world.step(broken)
        assert bodies.same(world.step(whole(3, i)), other.step(whole(3, i)))


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_ranks_fail_together(comm: Any, what: str, device: str) -> None:
    """In a step that adapts."""
    broken = bodies.broken_gradients(comm.size, comm.size - 1)[what]
    world = Mpi(comm, LAYOUT, ALQ(bucket=64, update_steps=(1,)), device=device)
    bodies.fails_without_trace(world, *broken)
    levels = got(world.runtime._participant.state.shared["levels"])
    assert len(set(comm.allgather(levels.tobytes()))) == 1


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
def test_levels_on_real_ranks_are_those_of_simulated_ones(comm: Any, device: str) -> None:
    scheme = ALQ(bucket=64, update_steps=(1,))
    world = Mpi(comm, LAYOUT, scheme, device=device)
    simulation = Simulation(comm.size, LAYOUT, scheme)
    for step in range(3):
        np.testing.assert_allclose(
            world.step(whole(comm.size, step)), simulation.allreduce(whole(comm.size, step))
        )
    state = world.runtime.state_dict()
    fresh = Mpi(comm, LAYOUT, scheme, device=device)
    fresh.runtime.load_state_dict(state)
    assert bodies.same(fresh.step(whole(comm.size, 3)), world.step(whole(comm.size, 3)))
    if comm.size > 1:  # all states to the last rank
        every = comm.allgather(state)
        fresh.runtime.load_state_dict(*(every if comm.rank == comm.size - 1 else []))
        assert bodies.same(fresh.runtime.state_dict()["shared/levels"], every[0]["shared/levels"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"form": "alqq"}, "form is 'alqq': did you mean 'alq'"),
        ({"fit": "gauss"}, "fit is 'gauss': known: histogram, normal"),
        ({"start": 0}, "start is 0"),
        ({"update_steps": [100]}, r"update_steps is \[100\]: give a tuple of whole numbers from 0"),
        ({"update_steps": (1.5,)}, "update_steps is"),
        ({"update_steps": (-1,)}, "update_steps is"),
        ({"update_every": -1}, "update_every is -1: give a whole number from 0"),
        ({"update_every": True}, "update_every is True"),
        ({"bits": 1}, "bits is 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_scheme("alq", **options)


def test_steps_that_adapt() -> None:
    assert [step for step in range(30_001) if ALQ().updates(step)] == [100, 2000, 10000, 20000, 30000]
    assert not any(ALQ(update_steps=(), update_every=0).updates(step) for step in range(100))
