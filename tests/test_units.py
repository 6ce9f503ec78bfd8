"""The small parts: layout, plan, message, rounds, costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitopk import costs
from mpitopk.errors import ExchangeError, LayoutError
from mpitopk.layout import Layout
from mpitopk.plan import entries, make_plan
from mpitopk.schemes import Dense, TopK
from mpitopk.simulate import Simulation
from mpitopk.transport import rounds
from mpitopk.wire import Message, Messages, Status, message_bytes

sizes = st.lists(st.integers(0, 50), min_size=0, max_size=8)


@given(sizes)
def test_views_are_the_buffer(lengths: list[int]) -> None:
    layout = Layout({f"s{i}": n for i, n in enumerate(lengths)})
    buffer = np.arange(layout.size, dtype=np.float32)
    views = layout.views(buffer)
    assert [v.size for v in views.values()] == lengths
    if lengths:
        np.testing.assert_array_equal(np.concatenate(list(views.values())), buffer)
    for view in views.values():
        view += 1
    np.testing.assert_array_equal(buffer, np.arange(layout.size) + 1)


@pytest.mark.parametrize(
    ("shapes", "dtype", "match"),
    [
        ({"w": -1}, "float32", "no extent may be negative"),
        ({"w": "ab"}, "float32", "whole number"),
        ({"w": 1.5}, "float32", "whole number"),
        ({"w": (3.5, 2)}, "float32", "whole number"),
        ({"w": "12"}, "float32", "whole number"),
        ({"w": None}, "float32", "whole number"),
        ({1: 2, "1": 3}, "float32", "not all different"),
        (["w"], "float32", "mapping"),
        (None, "float32", "mapping"),
        ({"w": 3}, np.float32, "give one of"),
        ({"w": 3}, ["float32"], "give one of"),
        ({"w": 2**32}, "float32", "split it over several"),
        ({"w": 3}, "int8", "give one of"),
    ],
)
def test_malformed_layouts(shapes: Any, dtype: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        Layout(shapes, dtype=dtype)


def test_layouts_of_arrays_and_their_digests() -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.float32)}
    layout = Layout.of(arrays)
    assert layout.size == 7
    assert layout.digest == Layout({"a": (2, 3), "b": ()}).digest
    others = [{"a": (3, 2), "b": ()}, {"b": (2, 3), "a": ()}, {"a": 6, "b": ()}]
    assert len({layout.digest, *(Layout(o).digest for o in others)}) == 4
    with pytest.raises(LayoutError, match="flat buffer of 7"):
        layout.views(np.zeros(8))
    with pytest.raises(LayoutError, match="dtypes float32, float64"):
        Layout.of(arrays | {"c": np.zeros(1)})


def test_how_many_entries() -> None:
    cases = {(0.01, 100): 1, (0.01, 149): 1, (0.01, 150): 2, (1e-9, 7): 1, (1, 7): 7, (0.5, 5): 3}
    for (density, size), expected in cases.items():
        assert entries(density, size) == expected


@given(sizes, st.floats(1e-6, 1), st.booleans(), st.integers(0, 30))
def test_a_plan_covers_the_buffer(lengths: list[int], density: float, each: bool, below: int) -> None:
    layout = Layout({str(i): n for i, n in enumerate(lengths)})
    plan = make_plan(layout, density, per_segment=each, dense_below=below)
    at = 0
    for start, stop, group in plan.pieces.tolist():
        assert start == at < stop
        assert -1 <= group < len(plan.counts)
        at = stop
    assert at == layout.size
    for group, count in enumerate(plan.counts.tolist()):
        rows = plan.pieces[plan.pieces[:, 2] == group]
        assert 0 < count < (rows[:, 1] - rows[:, 0]).sum()
    for segment in layout:
        if 0 < segment.size < below:
            assert any(s <= segment.start and segment.stop <= e for s, e in plan.dense.tolist())


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["float16", "float32", "float64"]))
def test_messages_read_as_they_were_written(count: int, dense: int, dtype: str) -> None:
    size = message_bytes(count, dense, np.dtype(dtype).itemsize)
    assert size % 8 == 0
    message = Message.blank(np.empty(size, np.uint8), count, dense, dtype, 2**64 - 1)
    message.indices[:] = np.arange(count)
    message.values[:] = np.arange(count + dense)
    message.sign(Status.FINE, 3, -5)
    every = Messages(np.concatenate([message.buffer] * 2), [0, size], [size] * 2)
    assert every.all_fine(message)
    assert every.latest == -5
    assert every.counts == [count] * 2
    rows = np.array([[0, dense]])
    for indices, values in every.parts(rows):
        np.testing.assert_array_equal(indices, message.indices)
        np.testing.assert_array_equal(values, message.values)


def two_messages() -> tuple[Message, Messages]:
    size = message_bytes(3, 0, 4)
    message = Message.blank(np.empty(size, np.uint8), 3, 0, "float32", 7)
    message.sign(Status.FINE, 1, 0)
    return message, Messages(np.concatenate([message.buffer] * 2), [0, size], [size] * 2)


@pytest.mark.parametrize(
    ("at", "match"),
    [(0, "magic"), (5, "itemsize"), (8, "step 0, expected 1"), (16, "do not fill"), (24, "layout")],
)
def test_foreign_and_damaged_headers(at: int, match: str) -> None:
    message, every = two_messages()
    every.buffer[every.starts[1] + at] ^= 1
    with pytest.raises(ExchangeError, match=f"message of rank 1 .*{match}"):
        every.all_fine(message)


@pytest.mark.parametrize("status", [Status.NONFINITE, Status.FAILED])
@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_a_status_is_seen(status: Status, who: list[int]) -> None:
    message, every = two_messages()
    for rank in who:
        every.buffer[every.starts[rank] + 4] = status
    if who == [0, 1]:
        message.sign(status, 1, 0)
    assert not every.all_fine(message)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(9, 100))
def test_rounds_move_everything_within_the_limit(lengths: list[int], limit: int) -> None:
    moved = [0] * len(lengths)
    for offset, counts in rounds(lengths, limit):
        assert sum(counts) <= limit
        for rank, n in enumerate(counts):
            if n:
                assert moved[rank] == offset
                moved[rank] += n
    assert moved == lengths


def test_costs() -> None:
    assert costs.allgatherv_bytes([5, 6, 7], 1) == 12
    assert costs.allreduce_bytes(100, 4) == 150
    assert costs.break_even(64, 4) == 1 / 64
    network = costs.Network(latency=1.0, bandwidth=10.0)
    assert network.allgatherv([10, 20, 30]) == 2 * 1.0 + 50 / 10
    assert network.allreduce(40, 4) == 4 * 1.0 + 60 / 10
    assert network.allgatherv([10]) == 0


def test_the_simulated_clock_and_bytes() -> None:
    layout = Layout({"w": 1000})
    gradients = np.ones((4, 1000), np.float32)
    dense, sparse = Simulation(4, layout, Dense()), Simulation(4, layout, TopK(0.01))
    for simulation in (dense, sparse):
        simulation.allreduce(gradients)
    assert dense.bytes == 6000
    assert sparse.bytes == 3 * (40 + 40 + 40)
    assert 0 < sparse.clock < dense.clock
