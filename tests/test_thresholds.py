"""Selection by a threshold: the operations of every device, and what the schemes built on them promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import computes, opened
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_device import floats

from mpitopk.device.hashing import sampled, splitmix64
from mpitopk.device.reference import ReferenceDevice
from mpitopk.layout import Layout
from mpitopk.plan import Plan, make_chunk_plan, make_plan
from mpitopk.typing import Array

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    per_segment=st.booleans(),
    below=st.sampled_from([0, 0, 5, 20]),
    dtype=st.sampled_from(["float32", "float64"]),
    threshold=st.sampled_from([0.0, 1e-45, 0.1, 1.0, 1e39]),
    least=st.integers(0, 12),
    most=st.integers(0, 100),
    data=st.data(),
)
def test_what_is_above_moves_if_neither_few_nor_many(
    device: str,
    lengths: list[int],
    per_segment: bool,
    below: int,
    dtype: str,
    threshold: float,
    least: int,
    most: int,
    data: st.DataObject,
) -> None:
    assume(computes(device, dtype))
    layout = Layout({str(i): n for i, n in enumerate(lengths)}, dtype=dtype)
    plan = make_plan(layout, 0.1, per_segment=per_segment, dense_below=below)
    x = data.draw(arrays(dtype, layout.size, elements=floats))
    with np.errstate(over="ignore"):
        limit = float(np.dtype(dtype).type(threshold))
    rows = plan.pieces.tolist()
    members = [i for start, stop, group in rows if group >= 0 for i in range(start, stop)]
    right = [i for i in members if abs(float(x[i])) >= limit]
    left, indices, values = x.copy(), np.empty(most, np.uint32), np.empty(most, dtype)
    assert opened(device, 2).move_above(left, plan, threshold, least, indices, values) == len(right)
    rest = x.copy()
    if least <= len(right) <= most:
        assert indices[: len(right)].tolist() == right
        assert values[: len(right)].tobytes() == x[right].tobytes()
        rest[right] = 0
    assert left.tobytes() == rest.tobytes()


@pytest.mark.parametrize("threads", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_buffers_are_as_the_reference_says(device: str, threads: int, dtype: str) -> None:
    """More than the threads' least share, or a tile; pieces begin anywhere."""
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    lengths = [5, 4097, 3, 140_001, 700, 2, 9000, 64, 4095]
    layout = Layout({str(i): n for i, n in enumerate(lengths)}, dtype=dtype)
    plan = make_plan(layout, 0.02, per_segment=False, dense_below=100)
    on, reference = opened(device, threads), ReferenceDevice()
    whole = np.random.default_rng(0).standard_normal(layout.size).astype(dtype)
    for threshold, least in (2.5, 0), (2.5, 1970), (0.1, 0), (9.0, 0), (0.0, 0):
        every = []
        for each in on, reference:
            x, indices, values = whole.copy(), np.zeros(2000, np.uint32), np.zeros(2000, dtype)
            count = each.move_above(x, plan, threshold, least, indices, values)
            moved = count if least <= count <= 2000 else 0
            every.append((count, x.tobytes(), indices[:moved].tobytes(), values[:moved].tobytes()))
        assert every[0] == every[1]
    for m in 1, 100, 70_000, 150_000:
        out, right = np.empty(m, dtype), np.empty(m, dtype)
        on.sample(whole, plan, 2**64 - 50, out)
        reference.sample(whole, plan, 2**64 - 50, right)
        assert out.tobytes() == right.tobytes()


def same_search(on: Any, x: Array, plan: Plan, threshold: float, most: int, rounds: int) -> int:
    """A device finds and moves what the definition does; return how much."""
    every = []
    for each in on, ReferenceDevice():
        left, indices, values = x.copy(), np.zeros(most, np.uint32), np.zeros(most, x.dtype)
        count = each.search_above(left, plan, threshold, max(1, most // 2), rounds, indices, values)
        every.append((count, left.tobytes(), indices[:count].tobytes(), values[:count].tobytes()))
    assert every[0] == every[1]
    return int(every[0][0])


def searches(on: Any, dtype: str, n: int) -> None:
    """Thresholds that are right, near, far too low or high; shapes whose sample says much or nothing."""
    layout = Layout({"a": n // 3, "b": 30, "c": n - n // 3 - 30}, dtype=dtype)
    plan = make_plan(layout, 0.02, per_segment=False, dense_below=100)
    x = np.random.default_rng(n).standard_normal(n).astype(dtype)
    ramp = np.arange(n).astype(dtype)
    for most in 1, n // 50, n // 3, n:
        for threshold in 2.5, 1e-3, 1e4, np.inf:
            for rounds in 0, 1, 3, 30:
                same_search(on, x, plan, threshold, most, rounds)
            same_search(on, ramp, plan, threshold, most, 30)
            assert same_search(on, np.round(x), plan, threshold, 2, 30) <= 2
            assert same_search(on, np.ones_like(x), plan, threshold, n // 2, 9) == 0
    near = float(np.quantile(np.abs(x), 0.985))
    assert same_search(on, x, plan, near, n // 50, 1) > 0
    assert same_search(on, x, plan, 1e4, n // 50, 30) > 0
    x[: n // 100] *= 1e6
    assert same_search(on, x, plan, 1e-3, n // 100, 40) > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_search_goes_the_way_it_is_defined(device: str, dtype: str) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    searches(opened(device, 2), dtype, 3000)


def test_a_few_tiles(device: str) -> None:
    """Moved, refused, sampled, and the largest of chunks, as the reference says."""
    layout = Layout({"a": 5000, "b": 3, "c": 4000})
    plan = make_chunk_plan(layout, 300, per_segment=False, dense_below=10)
    whole = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
    every = []
    for on in opened(device, 1), ReferenceDevice():
        x, indices, values = whole.copy(), np.zeros(200, np.uint32), np.zeros(200, np.float32)
        chosen, drawn = np.zeros(plan.total, np.uint32), np.zeros(100, np.float32)
        counts = [on.move_above(x, plan, threshold, 0, indices, values) for threshold in (1.0, 2.5)]
        moved = indices[: counts[1]].tobytes(), values[: counts[1]].tobytes()
        on.sample(x, plan, 5, drawn)
        on.chunk_maxima(x, plan, 300, chosen)
        every.append((counts, x.tobytes(), *moved, drawn.tobytes(), chosen.tobytes()))
    assert every[0] == every[1]
    assert every[0][0][0] > 200 > every[0][0][1] > 0


@pytest.mark.parametrize("size", [1, 2, 97, 1000, 2**32 - 1])
@pytest.mark.parametrize("part", [1, 0.37, 1e-8])
def test_a_sample_has_one_position_of_each_part(size: int, part: float) -> None:
    """By whole numbers of any length, from the definition."""
    m = min(5000, max(1, int(part * size)))
    drawn = [splitmix64((7 + i) % 2**64) >> 33 for i in range(m)]
    right = [((i * 2**31 + u) * size) // (m * 2**31) for i, u in enumerate(drawn)]
    assert sampled(m, size, 7).tolist() == right
    assert max(right) < size


def test_every_position_is_sampled_equally_often() -> None:
    hits = np.zeros(97)
    for key in range(3000):
        hits[sampled(10, 97, splitmix64(key)).astype(np.int64)] += 1
    expected = 3000 * 10 / 97
    assert ((hits - expected) ** 2 / expected).sum() < 150, "chi-square, 96 degrees of freedom"
