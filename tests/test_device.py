"""The operations of every device against their definitions, written out in plain Python."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from devices import computes, opened
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mpitopk.device.base import TOO_LARGE
from mpitopk.device.hashing import permuted
from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ExchangeError
from mpitopk.layout import Layout
from mpitopk.plan import NOWHERE, Plan, make_plan
from mpitopk.typing import Array
from mpitopk.wire import Message, Messages, Status, message_bytes

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPECIAL = np.array([0, -0.0, 1, -1, 1e-45, -1e-45, 1e-38, 7e28, -7e28, 0.1, -2.5], np.float32).tolist()
floats = st.one_of(st.sampled_from(SPECIAL), st.floats(-(2.0**95), 2.0**95, width=32))


def one_group(n: int, k: int) -> Plan:
    return Plan(np.array([[0, n, 0]], np.int64), np.array([k], np.int64))


def winners(x: Array, plan: Plan) -> list[int]:
    """The first k of each group by (magnitude descending, index ascending), ascending by index."""
    found: list[int] = []
    for group, count in enumerate(plan.counts.tolist()):
        rows = [row for row in plan.pieces.tolist() if row[2] == group]
        members = [i for start, stop, _ in rows for i in range(start, stop)]
        found += sorted(members, key=lambda i: (-abs(float(x[i])), i))[:count]
    return sorted(found)


@many
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    density=st.floats(1e-3, 1),
    per_segment=st.booleans(),
    below=st.sampled_from([0, 0, 5, 20]),
    dtype=st.sampled_from(["float32", "float64"]),
    data=st.data(),
)
def test_selection_is_exact(
    device: str,
    lengths: list[int],
    density: float,
    per_segment: bool,
    below: int,
    dtype: str,
    data: st.DataObject,
) -> None:
    assume(computes(device, dtype))
    layout = Layout({str(i): n for i, n in enumerate(lengths)}, dtype=dtype)
    plan = make_plan(layout, density, per_segment=per_segment, dense_below=below)
    n = layout.size
    x = data.draw(arrays(dtype, n, elements=floats))
    on = opened(device, 2)
    indices, values = np.empty(plan.total, np.uint32), np.empty(plan.total, dtype)
    assert on.select(x, plan, indices, values)
    expected = winners(x, plan)
    assert indices.tolist() == expected
    assert values.tobytes() == x[expected].tobytes()

    out = np.full(n, np.nan, dtype)
    assert on.accumulate_select(x, np.zeros(n, dtype), out, plan, indices, values)
    left = x + np.zeros(n, dtype)
    left[expected] = 0
    assert indices.tolist() == expected
    np.testing.assert_array_equal(out, left)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 50, 99])
def test_nonfinite_entries_are_found(device: str, dtype: str, bad: float, where: int) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    wide = "float64" if dtype == "float64" else "float32"
    x = np.ones(100, np.float32)
    x[where] = bad
    x = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "uint16" else x.astype(dtype)
    on, out = opened(device, 2), np.zeros(100, wide)
    plan, entries = one_group(100, 3), (np.empty(3, np.uint32), np.empty(3, wide))
    assert not on.finite(x)
    assert not on.accumulate(x, None, out)
    assert not on.accumulate_select(x, np.zeros(100, wide), out, plan, *entries)
    assert on.zero_nonfinite(x) == 1
    assert on.finite(x)
    assert on.accumulate(x, None, out)
    assert out.tolist() == [float(i != where) for i in range(100)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
@pytest.mark.parametrize("n", [0, 1, 255, 4097, 70_001, 300_007])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_weighted_sums_and_norms(device: str, dtype: str, n: int, threads: int) -> None:
    """The reference in float64 to rounding; the reference device to the bit."""
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    wide, rng = "float64" if dtype == "float64" else "float32", np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32)
    g = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "uint16" else x.astype(dtype)
    exact = (g.astype(np.uint32) << 16).view(np.float32) if dtype == "uint16" else g.astype(np.float64)
    on, reference = opened(device, threads), ReferenceDevice()
    assert on.norm(g) == reference.norm(g)
    np.testing.assert_allclose(on.norm(g), np.linalg.norm(exact.astype(np.float64)), rtol=1e-12)
    residual, out = rng.standard_normal(n).astype(wide), np.empty(n, wide)
    layout = Layout({"a": n // 3, "small": n // 5, "b": n - n // 3 - n // 5}, dtype=wide)
    plan = make_plan(layout, 0.1, per_segment=False, dense_below=n // 5 + 1)
    sums, norm = np.empty(n, wide), on.accumulate_norm(g, residual, out, plan)
    assert norm == reference.accumulate_norm(g, residual, sums, plan)
    sparse = [exact.astype(np.float64)[:0]] + [sums[a:b].astype(np.float64) for a, b in plan.sparse.tolist()]
    np.testing.assert_allclose(norm, np.linalg.norm(np.concatenate(sparse)), rtol=1e-12)
    assert out.tobytes() == sums.tobytes()
    expected = out.copy()
    assert on.accumulate(g, residual, out, scale=0.3, keep=0.9)
    assert reference.accumulate(g, residual, expected, scale=0.3, keep=0.9)
    assert out.tobytes() == expected.tobytes()
    np.testing.assert_allclose(out, 0.9 * residual + 0.3 * exact, rtol=1e-5, atol=1e-6)
    assert on.accumulate(g, None, out, scale=2)
    np.testing.assert_array_equal(out, 2 * exact)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [9, 4099])
def test_what_would_overflow_in_a_sum_over_ranks_is_not_accumulated(device: str, n: int, dtype: str) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    on, limit = opened(device, 1), np.dtype(dtype).type(TOO_LARGE[dtype])
    out, entries = np.empty(n, dtype), (np.empty(2, np.uint32), np.empty(2, dtype))
    for large, sound in ((np.nextafter(limit, 0), True), (limit, False), (np.finfo(dtype).max, False)):
        for sign in (1, -1):
            x = np.zeros(n, dtype)
            x[n // 2] = sign * large / 2
            assert on.accumulate(x, x, out) == sound
            assert on.accumulate_select(x, x, out, one_group(n, 2), *entries) == sound
            assert on.select(2 * x, one_group(n, 2), *entries) == sound
    assert not on.divide(np.full(n, np.inf, dtype), 3)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (6, 2), (6, 5), (300, 299), (1000, 1)])
def test_random_indices_are_distinct_and_in_the_group(device: str, n: int, k: int) -> None:
    plan = Plan(np.array([[0, 4, -1], [4, 4 + n, 0], [4 + n, 9 + n, 1]], np.int64), np.array([k, 2]))
    on, out = opened(device, 2), np.empty(k + 2, np.uint32)
    for key in range(20):
        on.random_indices(plan, key, out)
        assert len(set(out.tolist())) == k + 2
        assert out.tolist() == sorted(out.tolist())
        assert 4 <= out[0] <= out[k - 1] < 4 + n <= out[k]
        assert out[-1] < 9 + n


def test_all_pairs_are_drawn_equally_often(device: str) -> None:
    on, out, plan = opened(device, 1), np.empty(2, np.uint32), one_group(6, 2)
    seen: Counter[tuple[int, ...]] = Counter()
    for key in range(600):
        on.random_indices(plan, key, out)
        seen[tuple(out.tolist())] += 1
    assert len(seen) == 15
    assert sum((count - 40) ** 2 / 40 for count in seen.values()) < 40, "chi-square, 14 degrees of freedom"


@pytest.mark.parametrize("size", [2**32 - 1, 2**31, 2**16 + 1])
def test_random_positions_of_large_groups(size: int) -> None:
    drawn = permuted(5000, size, 7)
    assert len(set(drawn.tolist())) == 5000
    assert 0 <= drawn.min() < size / 100
    assert size - size / 100 < drawn.max() < size


def sent(indices: list[int], values: list[float], dense: int = 0, dtype: str = "float32") -> Message:
    size = message_bytes(len(indices), dense, np.dtype(dtype).itemsize)
    message = Message.blank(np.empty(size, np.uint8), len(indices), dense, dtype)
    message.indices[:], message.values[:] = indices, values
    message.sign(Status.FINE, 0, 0)
    return message


def gathered(*messages: Message) -> Messages:
    sizes = [message.buffer.size for message in messages]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Messages(np.concatenate([message.buffer for message in messages]), starts, sizes)


NO_DENSE: Array = np.empty((0, 2), np.int64)


def test_messages_are_added_in_rank_order_from_zero(device: str) -> None:
    """In float32, 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    on = opened(device, 2)
    for values, expected in ([1e8, 1, -1e8], 0.0), ([1e8, -1e8, 1], 1 / 3), ([-0.0, -0.0, -0.0], 0.0):
        messages = gathered(*(sent([2], [value]) for value in values))
        out = np.full(4, np.nan, np.float32)
        assert on.merge(messages, NO_DENSE, 3, out) == 1
        assert out.tobytes() == np.array([0, 0, expected, 0], np.float32).tobytes()
        indices, merged = on.merge_sparse(messages, NO_DENSE, 3, 4, "float32")
        assert (indices.tolist(), merged.tobytes()) == ([2], out[2:3].tobytes())


def test_merging_counts_entries_once_and_keeps_zeros(device: str) -> None:
    """An entry that was sent as zero, or that cancels, is still one that some rank sent."""
    on, out = opened(device, 1), np.empty(8, np.float32)
    dense = np.array([[6, 8]], np.int64)
    messages = gathered(sent([0, 3], [0, 2, 5, 6], 2), sent([], [7, 8], 2), sent([3, 4], [-2, 1, 9, 10], 2))
    assert on.merge(messages, dense, 2, out) == 5
    assert out.tolist() == [0, 0, 0, 0, 0.5, 0, 10.5, 12]
    indices, values = on.merge_sparse(messages, dense, 2, 8, "float32")
    assert indices.tolist() == [0, 3, 4, 6, 7]
    assert values.tolist() == [0, 0, 0.5, 10.5, 12]


@many
@given(x=st.lists(st.floats(-1e5, 1e5, width=32), min_size=4, max_size=40))
def test_what_float16_cannot_hold_stays(device: str, x: list[float]) -> None:
    """Decoded value + remainder is the value, exactly; nothing is sent as Inf."""
    on, n = opened(device, 1), len(x)
    plan = Plan(np.array([[0, 2, -1], [2, n, 0]], np.int64), np.array([1]))
    accumulated = np.array(x, np.float32)
    indices, values = np.empty(1, np.uint32), np.empty(1, np.float32)
    on.select(accumulated, plan, indices, values)
    left = accumulated.copy()
    left[indices] = 0
    size = message_bytes(1, 2, 2)
    message = Message.blank(np.empty(size, np.uint8), 1, 2, "float16")
    on.pack(left, plan, indices, values, message)
    assert np.isfinite(message.values).all()
    whole = left.astype(np.float64)
    whole[indices] += message.values[:1]
    whole[:2] += message.values[1:]
    np.testing.assert_array_equal(whole, accumulated)
    at = [int(indices[0]), 0, 1]
    inside = np.abs(accumulated[at]) <= 65504
    half = np.maximum(np.abs(accumulated[at]) * 2.0**-11, 2.0**-25)
    assert (np.abs(left[at])[inside] <= half[inside]).all()


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
def test_take(device: str, clear: bool, dtype: str) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    wide = "float64" if dtype == "float64" else "float32"
    on, indices = opened(device, 1), np.array([0, 3], np.uint32)
    x: Any = np.array([1, 2, 3, 4], np.float32)
    x = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "uint16" else x.astype(dtype)
    values = np.empty(2, wide)
    on.take(x, indices, values, clear=clear)
    assert values.tolist() == [1, 4]
    assert (x == 0).tolist() == [clear, False, False, clear]


def in_groups(rng: np.random.Generator, plan: Plan, dtype: str) -> Message:
    """A message of the plan with random entries, many of them equal, and dense values."""
    members = [
        np.concatenate([np.arange(a, b) for a, b, g in plan.pieces.tolist() if g == group])
        for group in range(plan.counts.size)
    ]
    pairs = zip(members, plan.counts.tolist(), strict=True)
    at = [np.sort(rng.choice(where, count, replace=False)) for where, count in pairs]
    size = message_bytes(plan.total, plan.dense_total, np.dtype(dtype).itemsize)
    message = Message.blank(np.empty(size, np.uint8), plan.total, plan.dense_total, dtype)
    message.indices[:] = np.concatenate([*at, np.empty(0, int)])
    message.values[:] = rng.choice([-2, -1, -0.0, 0, 0.1, 1, 2, 3e28], message.values.size)
    return message


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("lengths", "density"), [((300, 5, 41, 2), 0.3), ((50_000,), 0.25), ((70, 3), 0.9), ((2, 2), 1)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_two_messages_make_one(
    device: str, dtype: str, lengths: tuple[int, ...], density: float, threads: int
) -> None:
    """The largest of each group's sums, and what is left of them: by the definition, both ways round."""
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    layout = Layout({str(i): n for i, n in enumerate(lengths)}, dtype=dtype)
    on, rng = opened(device, threads), np.random.default_rng(len(lengths))
    for below in (0, 4):
        plan = make_plan(layout, density, per_segment=True, dense_below=below)
        k, first = plan.total, [0, *np.cumsum(plan.counts).tolist()]
        mine, theirs = (in_groups(rng, plan, dtype) for _ in range(2))
        results = []
        for one, other in (mine, theirs), (theirs, mine):
            out = in_groups(rng, plan, dtype)
            left = np.empty(k, np.uint32), np.empty(k, dtype)
            on.reserve(plan)
            assert on.combine(one, other, plan, out, *left)
            results.append(
                (out.indices.tobytes(), out.values.tobytes(), left[0].tobytes(), left[1].tobytes())
            )
        assert results[0] == results[1]
        np.testing.assert_array_equal(out.values[k:], mine.values[k:] + theirs.values[k:])
        for begin, end in itertools.pairwise(first):
            sums: dict[int, Any] = {}
            for message in (mine, theirs):
                for i, value in zip(
                    message.indices[begin:end].tolist(), message.values[begin:end], strict=True
                ):
                    sums[i] = sums[i] + value if i in sums else value
            ranking = sorted(sums, key=lambda i: (-abs(sums[i]), i))
            won, lost = sorted(ranking[: end - begin]), sorted(ranking[end - begin :])
            empty = end - begin - len(lost)
            assert out.indices[begin:end].tolist() == won
            assert out.values[begin:end].tobytes() == np.array([sums[i] for i in won], dtype).tobytes()
            assert left[0][begin:end].tolist() == lost + [NOWHERE] * empty
            right = np.array([sums[i] for i in lost] + [0] * empty, dtype)
            assert left[1][begin:end].tobytes() == right.tobytes()


def test_sums_of_two_messages_that_are_too_large(device: str) -> None:
    on, plan = opened(device, 1), Plan(np.array([[0, 4, 0], [4, 5, -1]], np.int64), np.array([2]))
    out, left = sent([0, 1], [0, 0, 0], 1), (np.empty(2, np.uint32), np.empty(2, np.float32))
    big, small = sent([0, 2], [7e28, 1, 1], 1), sent([1, 3], [1, 1, 1], 1)
    assert on.combine(big, small, plan, out, *left)
    assert not on.combine(big, big, plan, out, *left)
    dense = sent([1, 3], [1, 1, 7e28], 1)
    assert not on.combine(dense, dense, plan, out, *left)


@pytest.mark.parametrize("wrong", [[2, 1, 6], [1, 1, 6], [1, 5, 6], [1, 2, 3], [1, 2, 9], [1, 2, 2**32 - 1]])
def test_messages_that_are_not_of_the_plan(device: str, wrong: list[int]) -> None:
    on, plan = opened(device, 1), Plan(np.array([[0, 5, 0], [5, 9, 1]], np.int64), np.array([2, 1]))
    out, left = sent([0, 1, 5], [0, 0, 0]), (np.empty(3, np.uint32), np.empty(3, np.float32))
    with pytest.raises(ExchangeError, match="not ascending, or not as many in each segment"):
        on.combine(sent([0, 1, 5], [1, 2, 3]), sent(wrong, [1, 2, 3]), plan, out, *left)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_put_back_among_winners_or_elsewhere(device: str, dtype: str) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    on, indices = opened(device, 2), np.array([1, NOWHERE, 3, 4, NOWHERE], np.uint32)
    values, winners = np.array([1, 0, 2, 3, 0], dtype), np.array([0, 3, 4], np.uint32)
    x = np.full(6, 0.5, dtype)
    on.put_back(x, indices, values, winners, among=True)
    assert x.tolist() == [0.5, 0.5, 0.5, 2.5, 3.5, 0.5]
    on.put_back(x, indices, values, winners, among=False)
    assert x.tolist() == [0.5, 1.5, 0.5, 2.5, 3.5, 0.5]
    on.put_back(x, indices[:0], values[:0], winners[:0], among=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_values_are_put_back(device: str, threads: int) -> None:
    on, rng, n = opened(device, threads), np.random.default_rng(0), 400_000
    indices = np.sort(rng.choice(n, 90_000, replace=False)).astype(np.uint32)
    winners = np.sort(rng.choice(n, 200_000, replace=False)).astype(np.uint32)
    indices[rng.choice(indices.size, 30_000, replace=False)] = NOWHERE
    values = rng.standard_normal(indices.size).astype(np.float32)
    for among in (True, False):
        x = rng.standard_normal(n).astype(np.float32)
        expected = x.copy()
        on.put_back(x, indices, values, winners, among=among)
        ReferenceDevice().put_back(expected, indices, values, winners, among=among)
        assert x.tobytes() == expected.tobytes()
