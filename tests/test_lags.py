"""Layer by layer, as much as the backward pass hides: the rule, and what a step with it keeps and costs."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import LAYOUT, Mpi, Simulated, whole

from mpitopk import LAGS, Dense, Layout, Simulation, TopK, agreed_seconds
from mpitopk.costs import Network, allreduce_bytes, break_even
from mpitopk.errors import ConfigError, NonFiniteError
from mpitopk.layerwise import hidden_counts, overlap_bound
from mpitopk.wire import HEADER, message_bytes

NAMES = [s.name for s in LAYOUT]
TIMES = dict.fromkeys(NAMES, 0.0) | {"w": 3.1e-4, "v": 5.3e-4}
SCHEMES = {
    "two exchanges": LAGS(TIMES, latency=1e-9, bandwidth=1e6),
    "one exchange": LAGS(TIMES, latency=9e-5, bandwidth=4e6, cap=25),
    "all dense": LAGS(TIMES, cap=1),
    "all dense, apart": LAGS(TIMES, latency=0, cap=1),
}
APART = {"two exchanges", "all dense, apart"}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)

TICK = 2.0**-30
ticks = st.integers(0, 10**7).map(lambda n: n * TICK)
"""Times, and bandwidths, of which sums and products are exact."""
latencies = st.integers(0, 10**5).map(lambda n: n * TICK)
networks = st.builds(Network, latencies, st.integers(10, 30).map(lambda e: 2.0**e))
layers = st.lists(st.tuples(st.integers(0, 3000), ticks.filter(bool)), min_size=1, max_size=5)


@given(layers, st.integers(2, 64), networks, st.integers(1, 2000), st.sampled_from([0.0, TICK]))
def test_each_layer_sends_the_most_that_hides(
    layers: Any, ranks: int, network: Network, cap: int, select: float
) -> None:
    """Or one in `cap`; or everything, from where that moves less. Written as the inequality says it."""
    sizes, seconds = zip(*layers, strict=True)
    counts = hidden_counts(sizes, seconds, ranks, network, cap=cap, select_seconds=select)
    for i, (n, k) in enumerate(zip(sizes, counts, strict=True)):
        meanwhile = seconds[i - 1] if i else 0.0

        def hides(count: int, n: int = n, meanwhile: float = meanwhile) -> bool:
            exchange = (ranks - 1) * (network.latency + 8 * count / network.bandwidth)
            return bool(select * n + exchange <= meanwhile)

        least = -(-n // cap)
        if k == n:
            first = -(-n // ranks)
            assert least >= n / ranks or hides(first)
        else:
            assert least <= k < n / ranks
            assert k == least or hides(k)
            assert not hides(k + 1)


@given(layers, st.integers(1, 64), networks, st.integers(1, 2000), st.integers(0, 4), st.integers(1, 2000))
def test_more_time_or_a_faster_network_never_sends_less(
    layers: Any, ranks: int, network: Network, cap: int, at: int, more: int
) -> None:
    sizes, seconds = map(list, zip(*layers, strict=True))
    before = hidden_counts(sizes, seconds, ranks, network, cap=cap)
    faster = Network(network.latency, network.bandwidth * more)
    assert (np.array(hidden_counts(sizes, seconds, ranks, faster, cap=cap)) >= before).all()
    seconds[at % len(seconds)] *= more
    assert (np.array(hidden_counts(sizes, seconds, ranks, network, cap=cap)) >= before).all()
    assert sum(before) >= sum(-(-n // cap) for n in sizes)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=4), st.integers(2, 8), networks, ticks)
def test_segments_that_come_together_share_what_hides(
    sizes: list[int], ranks: int, network: Network, meanwhile: float
) -> None:
    """Their entries together are those of one such segment; each has its share of them, to rounding."""
    seconds = [meanwhile, TICK, *[0.0] * (len(sizes) - 1)]
    counts = hidden_counts([7, *sizes], seconds, ranks, network, cap=10**6)[1:]
    alone = hidden_counts([7, sum(sizes)], seconds[:2], ranks, network, cap=10**6)[1]
    if not meanwhile or alone == sum(sizes):
        return
    for n, k in zip(sizes, counts, strict=True):
        share = alone * n / sum(sizes)
        if k == n:
            assert max(share, 1) >= n / ranks - 1
        else:
            assert k == max(1, int(share))


def test_entries_follow_the_clock() -> None:
    """Not a constant that is called adaptive."""
    layout = Layout({"a": 10_000, "b": 10_000})
    slow, fast = (LAGS({"a": t, "b": 1e-3}, bandwidth=1.25e8) for t in (2e-4, 3e-4))
    assert slow.counts(layout, 8)["b"] < fast.counts(layout, 8)["b"] < 10_000 / 8
    for scheme in (slow, fast):
        simulation = Simulation(8, layout, scheme)
        simulation.allreduce(np.ones((8, 20_000), np.float32))
        counts = scheme.counts(layout, 8)
        assert counts["a"] == 10, "nothing hides the first layer"
        assert [p.rank.sent for p in simulation.participants] == [sum(counts.values())] * 8


@pytest.mark.parametrize(("value_bytes", "entry"), [(4, 8), (8, 12)])
def test_wider_values_take_longer(value_bytes: int, entry: int) -> None:
    network = Network(0, 1e6)
    counts = hidden_counts([9, 90_000], [1e-3 * entry, 1], 3, network, cap=1e9, value_bytes=value_bytes)
    assert counts[1] == 500
    layout = Layout({"a": 9, "b": 90_000}, dtype="float64" if value_bytes == 8 else "float16")
    scheme = LAGS({"a": 1e-3 * entry, "b": 1}, 0, 1e6, select_seconds=0)
    assert scheme.counts(layout, 3)["b"] == 500


def test_dense_from_where_it_moves_less() -> None:
    network = Network(0, 1e6)
    for ranks in (3, 8):
        edge = int(break_even(ranks, 4) * 24_000)
        for count, sent in ((edge - 1, edge - 1), (edge, 24_000)):
            seconds = (count + 0.5) * 8 * (ranks - 1) / 1e6
            assert hidden_counts([1, 24_000], [seconds, 1], ranks, network)[1] == sent


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1], [0.0]), ([1, 0, 1], [1.0, 1.0, 0.0]), ([], []), ([0], [1.0])]
)
def test_tiny_layers_are_sent_whole(sizes: list[int], seconds: list[float]) -> None:
    for ranks in (1, 2, 64):
        assert hidden_counts(sizes, seconds, ranks, Network()) == sizes


def test_a_single_rank_hides_nothing_and_sends_all() -> None:
    assert LAGS(TIMES).counts(LAYOUT, 1) == {s.name: s.size for s in LAYOUT}


def test_the_bound_on_the_gain() -> None:
    for forward, backward, exchange in ((1.0, 2.0, 4.0), (0.0, 3.0, 3.0), (5.0, 1.0, 0.0), (0.0, 0.0, 0.0)):
        serial, overlapped = forward + backward + exchange, forward + max(backward, exchange)
        expected = serial / overlapped if overlapped else 1
        assert overlap_bound(forward, backward, exchange) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_equal_densities_make_it_topk(size: int, device: str) -> None:
    """To the bit: one in 10 of each segment, and nothing that an allreduce moves faster."""
    layout = Layout({"a": 200, "b": 30, "c": 10})
    times = dict.fromkeys("abc", 0.0)
    ours = Simulated(size, layout, LAGS(times, cap=10), device=device)
    topk = Simulated(size, layout, TopK(0.1 if size > 1 else 1.0, per_segment=True), device=device)
    for step in range(6):
        g = np.random.default_rng(step).standard_normal((size, layout.size)).astype(np.float32)
        assert bodies.same(ours.step(g), topk.step(g))
        assert all(map(bodies.same, ours.residuals(), topk.residuals()))
    assert ours.simulation.bytes == topk.simulation.bytes


@each_scheme
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_conservation(scheme: LAGS, size: int, device: str) -> None:
    bodies.conserves(Simulated(size, LAYOUT, scheme, device=device))


@each_scheme
@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_sparse_mean_is_the_dense_one(scheme: LAGS, size: int, device: str) -> None:
    bodies.sparse_is_dense(*[Simulated(size, LAYOUT, scheme, device=device) for _ in range(2)])


@each_scheme
@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_a_failed_step_leaves_no_trace(scheme: LAGS, what: str, device: str) -> None:
    bodies.fails_without_trace(
        Simulated(4, LAYOUT, scheme, device=device), *bodies.broken_gradients(4, 3)[what]
    )


@pytest.mark.parametrize("name", sorted(APART))
def test_what_might_overflow_in_the_second_exchange_is_seen_before_the_first(name: str, device: str) -> None:
    world = Simulated(4, LAYOUT, SCHEMES[name], device=device)
    assert world.simulation.participants[0].state.apart  # type: ignore[attr-defined]
    g = whole(4, 0)
    g[:, -1] = 3e38  # segment "s", which is sent dense
    bodies.fails_without_trace(world, g, NonFiniteError, "too large")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes(name: str, size: int) -> None:
    """Of the entries with an index, and of the dense segments, in that message or by a ring allreduce."""
    simulation = Simulation(size, LAYOUT, SCHEMES[name])
    counts = SCHEMES[name].counts(LAYOUT, size)
    dense = sum(s.size for s in LAYOUT if counts[s.name] == s.size)
    k = sum(counts.values()) - dense
    apart = simulation.participants[0].state.apart  # type: ignore[attr-defined]
    assert apart == (name in APART and size > 2)
    message = message_bytes(k, 0 if apart else dense, 4)
    for step in range(3):
        simulation.allreduce(whole(size, step))
    expected = (size - 1) * message + (allreduce_bytes(4 * dense, size) if apart else 0)
    assert simulation.bytes == 3 * expected


def test_dense_segments_go_the_quicker_way() -> None:
    """What the clock says is no more than for either way alone, but for the headers."""
    layout = Layout({"a": 1000, "b": 1000})
    for latency in (1e-9, 1e-3):
        simulation = Simulation(8, layout, LAGS({"a": 1.0, "b": 1.0}, latency, 1e6, cap=1))
        simulation.network = Network(latency, 1e6)
        simulation.allreduce(np.ones((8, 2000), np.float32))
        network, headers = simulation.network, 8 * HEADER.size / 1e6
        together = network.allgatherv([8000] * 8)
        apart = network.allgatherv([0] * 8) + network.allreduce(8000, 8)
        assert simulation.clock == pytest.approx(min(together, apart), abs=headers)
        assert abs(together - apart) > 10 * headers


def test_everything_hidden_makes_it_dense() -> None:
    g = whole(4, 0)
    for scheme in SCHEMES["all dense"], SCHEMES["all dense, apart"]:
        ours, dense = (Simulation(4, LAYOUT, s) for s in (scheme, Dense()))
        np.testing.assert_array_equal(ours.allreduce(g), dense.allreduce(g))
        assert not np.any([state["residual"] for state in ours.residuals])


def test_what_is_left_is_less_than_random_entries_would_leave() -> None:
    """The assumption of the paper's proof, layer by layer, over steps with error feedback."""
    layout = Layout({"a": 400, "b": 300})
    scheme = LAGS({"a": 3e-4, "b": 1.0}, 1e-6, 1e6, cap=20)
    simulation = Simulation(4, layout, scheme)
    counts = scheme.counts(layout, 4)
    assert counts["a"] < 400
    assert counts["b"] < 300
    kept = np.zeros(700)
    for step in range(20):
        g = np.random.default_rng(step).standard_normal((4, 700)).astype(np.float32)
        a = kept + g.sum(axis=0)
        simulation.allreduce(g)
        kept = np.sum([state["residual"] for state in simulation.residuals], axis=0, dtype=np.float64)
        for s in layout:
            part = slice(s.start, s.stop)
            random = (1 - counts[s.name] / s.size) * (a[part] ** 2).sum()
            assert (kept[part] ** 2).sum() < random


def test_measuring_first_loses_nothing() -> None:
    """A run that hides nothing goes on, with what it kept, as one that knows the times."""
    first = Simulation(4, LAYOUT, LAGS(dict.fromkeys(NAMES, 0.0), cap=11))
    then = Simulation(4, LAYOUT, SCHEMES["two exchanges"])
    given, sent = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for step in range(8):
        run = first if step < 4 else then
        if step == 4:
            then.load_state_dicts(first.state_dicts())
        g = whole(4, step)
        given += g.sum(axis=0)
        sent += 4 * run.allreduce(g).astype(np.float64)
    kept = np.sum([state["residual"] for state in then.residuals], axis=0, dtype=np.float64)
    np.testing.assert_array_equal(sent + kept, given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backward_seconds": 0.5}, "backward_seconds is 0.5: give a mapping"),
        ({"backward_seconds": {"w": -1.0}}, "backward_seconds of 'w' is -1.0: give seconds, from 0"),
        ({"backward_seconds": {"w": np.nan}}, "backward_seconds of 'w' is nan"),
        ({"backward_seconds": {"w": np.inf}}, "backward_seconds of 'w' is inf"),
        ({"backward_seconds": {"w": "1"}}, "backward_seconds of 'w' is '1'"),
        ({"latency": -1e-6}, "latency is -1e-06: give seconds"),
        ({"select_seconds": None}, "select_seconds is None"),
        ({"bandwidth": 0}, "bandwidth is 0: give bytes per second, above 0"),
        ({"cap": 0.5}, "cap is 0.5: give a number from 1"),
        ({"cap": np.nan}, "cap is nan"),
        ({"capp": 3}, "LAGS has no option 'capp': did you mean 'cap'"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LAGS(**{"backward_seconds": TIMES, **options})


BAD_NAMES = {
    "misspelt": (TIMES | {"ww": 1.0}, "backward_seconds has 'ww', .* did you mean 'w'"),
    "missing": ({n: 0.0 for n in NAMES if n != "b"}, "backward_seconds lacks segment 'b': give"),
}


@pytest.mark.parametrize(("times", "match"), BAD_NAMES.values(), ids=BAD_NAMES)
def test_times_of_other_segments(times: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Simulation(2, LAYOUT, LAGS(times))


@pytest.mark.mpi
@pytest.mark.parametrize(("times", "match"), BAD_NAMES.values(), ids=BAD_NAMES)
def test_times_of_other_segments_on_one_rank_fail_on_all(comm: Any, times: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=f"rank {comm.size - 1}: {match}"):
        Mpi(comm, LAYOUT, LAGS(times if comm.rank == comm.size - 1 else TIMES))


@pytest.mark.mpi
def test_ranks_with_other_times_are_told(comm: Any) -> None:
    """The order in which the segments are named does not matter."""
    turned = dict(reversed(TIMES.items()))
    Mpi(comm, LAYOUT, LAGS(turned if comm.rank else TIMES)).runtime.close()
    if comm.size > 1:
        with pytest.raises(ConfigError, match="the runtimes differ: rank 1 has scheme LAGS"):
            Mpi(comm, LAYOUT, LAGS(TIMES | {"w": 1.0 + comm.rank}))


@pytest.mark.mpi
def test_ranks_agree_on_the_slowest_median(comm: Any) -> None:
    """So that all send as many entries of each segment."""
    mine = {"w": [9.0, comm.rank, 0.0], "b": [1.0] * 4, "none": [0.0], "v": [comm.size - comm.rank], "s": [0]}
    agreed = agreed_seconds(comm, mine)
    assert agreed == {"w": float(comm.size - 1), "b": 1.0, "none": 0.0, "v": float(comm.size), "s": 0.0}
    counts = LAGS(agreed, bandwidth=1e4).counts(LAYOUT, comm.size)
    assert comm.allgather(counts) == [counts] * comm.size


@pytest.mark.mpi
def test_samples_that_one_rank_lacks_fail_on_all(comm: Any) -> None:
    last = comm.size - 1
    with pytest.raises(ConfigError, match=f"rank {last}: there are no samples of 'b'"):
        agreed_seconds(comm, {"w": [1.0], "b": [] if comm.rank == last else [1.0]})
    if comm.size > 1:
        with pytest.raises(ConfigError, match=f"rank {last} has measured w, rank 0 w, b"):
            agreed_seconds(comm, {"w": [1.0]} | ({} if comm.rank == last else {"b": [1.0]}))
