"""Entries that stand out in their bin: the operations on bins, and what the scheme promises."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import oracle
import pytest
from devices import computes, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import LAYOUT, Simulated, whole

from mpitopk import AdaComp, Layout, Simulation
from mpitopk.bins import Bins
from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.typing import Array
from mpitopk.wire import HEADER, Message, Messages, message_bytes

REFERENCE = ReferenceDevice()
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(on: Any, bins: Bins, gradient: Array, residual: Array, factor: float = 2) -> tuple[Any, ...]:
    """Return how many entries are chosen, the words of their code, the scales, and the new residual."""
    out = np.full_like(residual, np.nan)
    marks = np.full(bins.total * bins.mark_words, 2**32 - 1, np.uint32)
    counts = np.full(bins.total, 7, bins.count_type)
    scales = np.full(len(bins.rows), np.nan, bins.scale_type)
    entries = on.select_bins(gradient, residual, out, bins, factor, marks, counts, scales)
    if entries is None:
        return (None,)
    words = np.full(bins.words(entries), 2**32 - 1, np.uint32)
    on.pack_bins(out, bins, marks, counts, scales, words)
    return entries, words, scales, out


def sent(words: Array) -> Message:
    room = np.empty(message_bytes(words.size, 0, 0), np.uint8)
    message = Message.blank(room, words.size, 0, None)
    message.indices[:] = words
    return message


def gathered(*codes: Array) -> Messages:
    messages = [sent(words) for words in codes]
    sizes = [message.buffer.size for message in messages]
    return Messages(np.concatenate([m.buffer for m in messages]), np.cumsum([0, *sizes])[:-1].tolist(), sizes)


def same_everywhere(on: Any, layout: Layout, size: int, ranks: int, seed: int, ties: bool) -> None:
    """Code, residual and mean of a device are those of the reference, to the bit."""
    rng, bins = np.random.default_rng(seed), Bins.of(layout, size)
    codes = []
    for _ in range(ranks):
        g, r = rng.standard_normal((2, layout.size)).astype(np.float32)
        if ties:
            g, r = np.round(g), np.round(r)
        truncated = (g.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        g = truncated if layout.dtype == "bfloat16" else g.astype(layout.storage)
        r = r.astype(layout.accumulator)
        mine, right = encoded(on, bins, g, r, 1.7), encoded(REFERENCE, bins, g, r, 1.7)
        assert mine[0] == right[0]
        for found, expected in zip(mine[1:], right[1:], strict=True):
            assert found.tobytes() == expected.tobytes()
        codes.append(right[1])
    out, expected = (np.full(layout.size, np.nan, layout.accumulator) for _ in range(2))
    messages = gathered(*codes)
    assert on.merge_bins(messages, bins, ranks, out) == REFERENCE.merge_bins(messages, bins, ranks, expected)
    assert out.tobytes() == expected.tobytes()


@many
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 31, 32, 33, 64, 127, 128, 129, 255, 256, 500, 32768]),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
    ties=st.booleans(),
)
def test_all_devices_do_the_same(
    device: str, lengths: list[int], size: int, dtype: str, ranks: int, seed: int, ties: bool
) -> None:
    if computes(device, dtype):
        layout = Layout({str(i): n for i, n in enumerate(lengths)}, dtype=dtype)
        same_everywhere(opened(device, 2), layout, size, ranks, seed, ties)


@pytest.mark.parametrize("size", [3, 50, 500, 20_000])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_many_bins_among_threads(device: str, size: int, threads: int) -> None:
    """More bins than a block of threads has, and segments that begin within what a thread does."""
    layout = Layout({"a": 70_001, "b": 1, "c": 0, "d": 49_999})
    same_everywhere(opened(device, threads), layout, size, 3, 0, ties=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 99])
def test_what_is_not_finite_is_found(device: str, bad: float, where: int) -> None:
    bins, g = Bins.of(Layout({"w": 100}), 30), np.ones(100, np.float32)
    g[where] = bad
    assert encoded(opened(device, 2), bins, g, np.zeros(100, np.float32)) == (None,)


def test_what_would_overflow_in_a_sum_over_ranks_is_found(device: str) -> None:
    on, big = opened(device, 1), np.full(90, 7e28, np.float32)
    assert encoded(on, Bins.of(Layout({"w": 90}), 30), big, big) == (None,)
    assert encoded(on, Bins.of(Layout({"w": 90}), 30), big, 0 * big)[0] == 90
    if computes(device, "float64"):
        huge = np.full(90, 1e308)
        assert encoded(on, Bins.of(Layout({"w": 90}, dtype="float64"), 30), huge, 0 * huge) == (None,)


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_what_counts_for_nothing_is_held_all_the_same(device: str, scale: float) -> None:
    """The mean of tiny maxima can round to zero: the sum of such entries is +0, and they are counted."""
    bins, g = Bins.of(Layout({"w": 100}), 50), np.where(np.arange(100) % 3, 1, -1).astype(np.float32)
    words = encoded(REFERENCE, bins, g, 0 * g)[1]
    bins.parts(words, 0)[0][:] = scale
    out = np.full(100, 7, np.float32)
    assert opened(device, 2).merge_bins(gathered(words, words), bins, 2, out) == 100
    assert out.tobytes() == bytes(400)


def counts_of(bins: Bins, words: Array) -> Array:
    return bins.parts(words, 0)[1]


def too_many(bins: Bins, words: Array) -> Array:
    counts_of(bins, words)[-1] = 11
    return words


def one_more(bins: Bins, words: Array) -> Array:
    """An entry that there is no room for, or a word that no entry fills."""
    counts_of(bins, words)[0] += 4
    return words


def beyond_its_bin(bins: Bins, words: Array) -> Array:
    bins.parts(words, 1)[2][0] = 90
    return words


def out_of_order(bins: Bins, words: Array) -> Array:
    entries = bins.parts(words, 2)[2]
    entries[1] = entries[0]
    return words


def cut_short(bins: Bins, words: Array) -> Array:  # noqa: ARG001
    return words[:4]


@pytest.mark.parametrize("damage", [too_many, one_more, beyond_its_bin, out_of_order, cut_short])
def test_a_damaged_message_is_named_and_nothing_is_written(device: str, damage: Any) -> None:
    layout = Layout({"a": 100, "b": 10})
    bins, g = Bins.of(layout, 50), np.ones(110, np.float32)
    words = encoded(REFERENCE, bins, g, 0 * g)[1]
    wrong = damage(bins, words.copy())
    out = np.full(110, 7, np.float32)
    for codes, rank in ([words, wrong, words, wrong], 1), ([wrong, words], 0):
        with pytest.raises(ExchangeError, match=f"the message of rank {rank} has bins whose entries are"):
            opened(device, 2).merge_bins(gathered(*codes), bins, 2, out)
        assert (out == 7).all()


EXACT = Layout({"w": 128, "v": 64, "x": 1})
"""In bins of 64 the scales have a few more bits than the entries: all sums are exact."""


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_nothing_is_lost(size: int, device: str) -> None:
    simulation = Simulated(size, EXACT, AdaComp(64), device=device)
    definition = oracle.AdaComp(size, [(s.start, s.stop) for s in EXACT], bin=64)
    old = np.zeros(EXACT.size)
    for step in range(4):
        g = whole(size, step, EXACT)
        mean = simulation.step(g)
        np.testing.assert_array_equal(mean, definition.step(g))
        np.testing.assert_array_equal(simulation.residuals(), definition.residuals)
        new = np.sum(simulation.residuals(), axis=0, dtype=np.float64)
        np.testing.assert_array_equal(size * mean.astype(np.float64) + new, g.sum(axis=0) + old)
        old = new


@pytest.mark.parametrize("size", [1, 3])
def test_a_sparse_mean_is_the_dense_one(size: int, device: str) -> None:
    bodies.sparse_is_dense(*(Simulated(size, LAYOUT, AdaComp(9), device=device) for _ in range(2)))


@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_a_failed_step_leaves_no_trace(what: str, device: str) -> None:
    broken = bodies.broken_gradients(3, 2)[what]
    bodies.fails_without_trace(Simulated(3, LAYOUT, AdaComp(9), device=device), *broken)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("size", "a_count", "an_entry"), [(9, 1, 1), (129, 1, 2), (500, 2, 2)])
def test_what_a_message_holds(size: int, a_count: int, an_entry: int, dtype: str) -> None:
    """Counts of all bins, the entries that are sent, a number for each segment, and not a byte more."""
    layout = Layout({"w": 1000, "none": 0, "b": 130}, dtype=dtype)
    simulation = Simulation(3, layout, AdaComp(size))
    for step in range(3):
        before = simulation.bytes
        simulation.allreduce(whole(3, step, layout, dtype))
        nbytes = 0
        for participant in simulation.participants[1:]:
            bins, entries = -(-1000 // size) + -(-130 // size), participant.rank.sent
            scales = 2 * np.dtype(dtype).itemsize
            code = scales + (bins * a_count + 3) // 4 * 4 + (entries * an_entry + 3) // 4 * 4
            nbytes += HEADER.size + (code + 7) // 8 * 8
        assert simulation.bytes - before == nbytes


def test_what_is_sent_stands_out() -> None:
    """Each entry is kept, or sent as the scale of its segment because the next gradient would carry it past
    the largest of its bin."""
    layout = Layout({"w": 1000, "b": 130})
    simulation, rng, residual = Simulation(1, layout, AdaComp(50)), np.random.default_rng(0), np.zeros(1130)
    for _ in range(20):
        g = rng.standard_normal(1130).astype(np.float32)
        decoded = simulation.allreduce([g]).copy()
        a = residual.astype(np.float32) + g
        for start, stop in (0, 1000), (1000, 1130):
            values = np.unique(np.abs(decoded[start:stop]))
            most = [np.abs(a[i : min(i + 50, stop)]).max() for i in range(start, stop, 50)]
            assert values.size == 2
            assert values[0] == 0
            assert values[1] == np.float32(np.mean(most, dtype=np.float64))
            for b, largest in enumerate(most):
                here = slice(start + 50 * b, min(start + 50 * b + 50, stop))
                ahead = np.abs(residual[here].astype(np.float32) + np.float32(2) * g[here])
                np.testing.assert_array_equal(decoded[here] != 0, ahead >= largest)
        residual = simulation.residuals[0]["residual"].astype(np.float64)


def test_small_gradients_send_only_the_largest_residuals() -> None:
    simulation = Simulation(1, Layout({"w": 500}), AdaComp(50))
    g = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    simulation.allreduce([g])
    residual = simulation.residuals[0]["residual"].copy()
    mean = simulation.allreduce([g * np.float32(1e-4)])
    most = np.abs(residual).reshape(10, 50).max(axis=1)
    near = np.abs(residual).reshape(10, 50) >= most[:, None] * 0.999
    assert 0 < np.count_nonzero(mean) <= 10
    assert near.reshape(-1)[mean != 0].all()


@pytest.mark.parametrize(("size", "ratio"), [(50, 38), (500, 100)])
def test_how_much_it_saves_on_laplace_noise(size: int, ratio: int) -> None:
    """Against float32, header and counts included: 40.3 and 116.3 in the 20th step with this seed."""
    layout, rng = Layout({"w": 50_000}), np.random.default_rng(0)
    simulation = Simulation(2, layout, AdaComp(size))
    for _ in range(20):
        before = simulation.bytes
        simulation.allreduce(rng.laplace(size=(2, layout.size)).astype(np.float32))
    assert layout.nbytes / (simulation.bytes - before) > ratio


def test_zeros_send_nothing(device: str) -> None:
    simulation = Simulated(3, LAYOUT, AdaComp(9), device=device)
    assert not simulation.step(np.zeros((3, LAYOUT.size), np.float32)).any()
    assert not np.any(simulation.residuals())
    assert all(p.rank.sent == p.rank.held == 0 for p in simulation.simulation.participants)
    simulation.step(whole(3, 0))
    before = simulation.residuals()
    assert simulation.step(np.zeros((3, LAYOUT.size), np.float32)).any(), "what was kept comes later"
    assert not np.array_equal(before, simulation.residuals())


@pytest.mark.parametrize("value", [1.0, -7e28, 1e-45])
def test_equal_entries_are_all_sent_as_they_are(value: float, device: str) -> None:
    simulation = Simulated(2, LAYOUT, AdaComp(9), device=device)
    g = np.full((2, LAYOUT.size), value, np.float32) * np.float32(0.5 if abs(value) > 1e38 else 1)
    np.testing.assert_array_equal(simulation.step(g), g[0])
    assert not np.any(simulation.residuals())


@pytest.mark.parametrize("n", [0, 1])
def test_hardly_any_entries(n: int, device: str) -> None:
    simulation = Simulated(3, Layout({"w": n}), AdaComp(), device=device)
    np.testing.assert_array_equal(simulation.step(np.full((3, n), 2, np.float32)), np.full(n, 2))
    assert not np.any(simulation.residuals())


def test_one_outlier_costs_precision_and_nothing_else() -> None:
    simulation = Simulation(1, Layout({"w": 1000}), AdaComp(100))
    g = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    g[3] = 1e6
    mean = simulation.allreduce([g])
    np.testing.assert_allclose(mean + simulation.residuals[0]["residual"], g, rtol=1e-6, atol=0.02)


@pytest.mark.parametrize(("option", "value"), [("bin", 0), ("bin", 32769), ("bin", 2.5), ("bin", True)])
def test_bins_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} is .*: give a whole number from 1 to 32768"):
        AdaComp(**{option: value})


@pytest.mark.parametrize("scale", [1, 0.5, float("inf"), float("nan"), "2"])
def test_scale_out_of_range(scale: Any) -> None:
    with pytest.raises(ConfigError, match=r"scale is .*: give a number above 1"):
        AdaComp(scale=scale)
