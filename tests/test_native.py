"""The compiled kernels give the bits of the plain NumPy ones, for any instructions and threads."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest
import test_adacomp
import test_grassmann
import test_thresholds
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitopk import Grassmann
from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ExchangeError
from mpitopk.layout import Layout
from mpitopk.plan import Plan, make_plan
from mpitopk.typing import Array
from mpitopk.wire import Message, Messages, Status, message_bytes

native = pytest.importorskip("mpitopk.device._native")
from mpitopk.device.host import HostDevice  # noqa: E402

REFERENCE = ReferenceDevice()
HOSTS = [HostDevice(threads, isa) for isa in native.isas() for threads in (1, 2, 3, 5)]
GRADIENTS = ["float32", "float64", "float16", "uint16"]
KINDS = ["normal", "ties", "zeros", "equal", "subnormal", "heavy", "ascending", "signed zeros"]
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def draw(kind: str, n: int, dtype: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    wide = {
        "normal": lambda: rng.standard_normal(n),
        "ties": lambda: rng.integers(-3, 4, n).astype(float),
        "zeros": lambda: np.zeros(n),
        "equal": lambda: np.full(n, -1.5),
        "subnormal": lambda: rng.standard_normal(n) * 1e-41,
        "heavy": lambda: np.clip(rng.standard_cauchy(n), -6e4, 6e4),
        "ascending": lambda: np.linspace(-1, 1, n) ** 3,
        "signed zeros": lambda: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    }[kind]()
    if dtype == "uint16":
        return (wide.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return wide.astype(dtype)


@st.composite
def plans(draw: Any, most: int = 3000) -> tuple[int, Plan]:
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=8))
    layout = Layout({str(i): size for i, size in enumerate(sizes)})
    density = draw(st.sampled_from([1e-6, 0.01, 0.1, 0.5, 0.99]))
    below = draw(st.sampled_from([0, 0, 2, 50, 1000]))
    return layout.size, make_plan(layout, density, per_segment=draw(st.booleans()), dense_below=below)


def selected(device: Any, gradient: Array, residual: Array, plan: Plan) -> tuple[Array, Array, Array, bool]:
    out = np.full(residual.size, np.nan, residual.dtype)
    indices, values = np.empty(plan.total, np.uint32), np.empty(plan.total, residual.dtype)
    finite = device.accumulate_select(gradient, residual, out, plan, indices, values)
    return indices, values, out, finite


def check_selection(host: HostDevice, gradient: Array, residual: Array, plan: Plan) -> None:
    expected = selected(REFERENCE, gradient, residual, plan)
    got = selected(host, gradient, residual, plan)
    for a, b in zip(expected[:3], got[:3], strict=True):
        assert same(a, b)
    assert expected[3] is got[3] is True


@pytest.mark.parametrize("kind", KINDS)
@few
@given(plans(), st.sampled_from(GRADIENTS), st.sampled_from(HOSTS), st.integers(0, 99))
def test_accumulate_select(kind: str, of: tuple[int, Plan], dtype: str, host: HostDevice, seed: int) -> None:
    n, plan = of
    accumulator = "float64" if dtype == "float64" else "float32"
    gradient, residual = draw(kind, n, dtype, seed), draw(kind, n, accumulator, seed + 1)
    for _ in range(2):
        check_selection(host, gradient, residual, plan)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(plans(), st.sampled_from(["float32", "float64"]), st.sampled_from(HOSTS), st.integers(0, 99))
def test_select(kind: str, of: tuple[int, Plan], dtype: str, host: HostDevice, seed: int) -> None:
    n, plan = of
    x = draw(kind, n, dtype, seed)
    kept = x.copy()
    expected = np.empty(plan.total, np.uint32), np.empty(plan.total, dtype)
    got = np.empty(plan.total, np.uint32), np.empty(plan.total, dtype)
    assert REFERENCE.select(x, plan, *expected)
    assert host.select(x, plan, *got)
    assert same(expected[0], got[0])
    assert same(expected[1], got[1])
    assert same(x, kept)


def one_group(n: int, k: int) -> Plan:
    return Plan(np.array([[0, n, 0]]), np.array([k]))


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("n", [200_003, 1_500_000])
@pytest.mark.parametrize("k", [1, 200, 20_000, 150_000])
def test_error_feedback_over_many_steps(isa: str, threads: int, n: int, k: int) -> None:
    """Thresholds warm up, the scale drifts, then jumps up and down: the result never depends on it."""
    host = HostDevice(threads, isa)
    plan = one_group(n, k)
    rng = np.random.default_rng(k)
    residual = host.zeros(n, "float32")
    for scale in [1, 1, 1, 1.01, 1, 0.99, 30, 0.01, 1, 1, 1]:
        gradient = rng.standard_normal(n, dtype=np.float32) * np.float32(scale)
        expected = selected(REFERENCE, gradient, residual, plan)
        out = host.empty(n, "float32")
        got = np.empty(k, np.uint32), np.empty(k, np.float32)
        assert host.accumulate_select(gradient, residual, out, plan, *got)
        assert same(expected[0], got[0])
        assert same(expected[1], got[1])
        assert same(expected[2], out)
        residual = out


def test_a_sudden_change_of_scale_costs_another_sample_and_not_another_scan() -> None:
    host, n = HostDevice(2), 1_000_000
    plan = one_group(n, 1000)
    rng = np.random.default_rng(0)
    indices, values = np.empty(1000, np.uint32), np.empty(1000, np.float32)
    for scale in (1, 1, 1.1, 0.01, 100):
        x = rng.standard_normal(n, dtype=np.float32) * np.float32(scale)
        assert host.select(x, plan, indices, values)
        assert host.fallbacks == 0
        assert host.engine.candidates < n // 200
        expected = np.empty_like(indices), np.empty_like(values)
        REFERENCE.select(x, plan, *expected)
        assert same(expected[0], indices)


def sampled_positions(n: int) -> np.ndarray:
    """Return where thresholds.hpp looks in a single group of n floats."""
    line = 16
    lines = min(2048, max(64, n // (128 * line)))
    stride = n // lines
    jitter = np.arange(lines, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(8)
    starts = np.arange(lines) * stride + jitter % (stride - line)
    return (starts[:, None] + np.arange(line)).ravel()


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("warm", [False, True])
def test_a_sample_that_misleads_leads_to_a_full_selection(isa: str, warm: bool) -> None:
    """All that the sample sees is large, and too little else is: the window lies too high."""
    host, n, k = HostDevice(1, isa), 400_000, 20_000
    plan, rng = one_group(n, k), np.random.default_rng(0)
    residual, out = np.zeros(n, np.float32), host.empty(n, "float32")
    got = np.empty(k, np.uint32), np.empty(k, np.float32)
    if warm:
        for _ in range(6):
            gradient = rng.standard_normal(n, dtype=np.float32) * 1000
            host.accumulate_select(gradient, residual, out, plan, *got)
    before = host.fallbacks
    gradient = rng.standard_normal(n, dtype=np.float32) / 100
    gradient[sampled_positions(n)] += 10
    expected = selected(REFERENCE, gradient, residual, plan)
    assert host.accumulate_select(gradient, residual, out, plan, *got)
    assert host.fallbacks - before == 1
    for right, found in zip(expected[:3], (*got, out), strict=True):
        assert same(right, found)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dense", [False, True])
def test_nonfinite_entries_are_seen_wherever_they_are(
    host: HostDevice, dtype: str, bad: float, dense: bool
) -> None:
    accumulator = "float64" if dtype == "float64" else "float32"
    n = 5000
    plan = Plan(np.array([[0, 100, -1 if dense else 0], [100, n, 0]]), np.array([20]))
    rest = [np.full(n, np.nan, accumulator), np.empty(20, np.uint32), np.empty(20, accumulator)]
    for where in (0, 63, 99, 100, n - 1):
        gradient = draw("normal", n, dtype, 0)
        gradient[where] = draw("normal", 1, dtype, 0)[0] * 0 if dtype == "uint16" else bad
        if dtype == "uint16":
            gradient[where] = np.float32(bad).view(np.uint32) >> 16
        assert not host.finite(gradient)
        out, indices, values = rest
        assert not host.accumulate_select(gradient, np.zeros(n, accumulator), out, plan, indices, values)
        assert not host.accumulate(gradient, None, out)
        assert host.zero_nonfinite(gradient) == 1
        assert host.finite(gradient)
        assert gradient[where] == 0
        assert host.accumulate_select(gradient, np.zeros(n, accumulator), out, plan, indices, values)


@few
@given(plans(), st.sampled_from(HOSTS), st.integers(0, 2**64 - 1))
def test_random_indices(of: tuple[int, Plan], host: HostDevice, key: int) -> None:
    _, plan = of
    expected, got = np.empty(plan.total, np.uint32), np.empty(plan.total, np.uint32)
    REFERENCE.random_indices(plan, key, expected)
    host.random_indices(plan, key, got)
    assert same(expected, got)


@few
@given(st.integers(0, 3000), st.sampled_from(GRADIENTS), st.sampled_from(HOSTS), st.booleans())
def test_elementwise(n: int, dtype: str, host: HostDevice, feedback: bool) -> None:
    accumulator = "float64" if dtype == "float64" else "float32"
    gradient = draw("heavy", n, dtype, n)
    residual = draw("normal", n, accumulator, n + 1) if feedback else None
    expected, got = np.empty(n, accumulator), np.empty(n, accumulator)
    assert REFERENCE.accumulate(gradient, residual, expected) == host.accumulate(gradient, residual, got)
    assert same(expected, got)
    assert REFERENCE.divide(expected, 3) == host.divide(got, 3)
    assert same(expected, got)
    indices = np.arange(0, n, 3, dtype=np.uint32)
    taken = np.empty(indices.size, accumulator), np.empty(indices.size, accumulator)
    copies = gradient.copy(), gradient.copy()
    REFERENCE.take(copies[0], indices, taken[0], clear=True)
    host.take(copies[1], indices, taken[1], clear=True)
    assert same(*taken)
    assert same(*copies)


@pytest.mark.skipif(sys.platform != "linux", reason="takes memory that is there only where it is written")
def test_more_than_two_to_the_31_entries() -> None:
    n, no_reserve = 2**31 + 4100, 0x4000
    room = mmap.mmap(-1, 4 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    x, at = np.frombuffer(room, np.float32), [0, 4097, 2**31 - 1, 2**31, 2**31 + 1, n - 1]
    x[at] = [1, -2, 3, -4, 5, -6]
    indices, values = np.empty(6, np.uint32), np.empty(6, np.float32)
    assert HostDevice(2).select(x, Plan(np.array([[0, n, 0]]), np.array([6])), indices, values)
    assert indices.tolist() == at
    assert values.tolist() == [1, -2, 3, -4, 5, -6]


@few
@given(
    plans(500),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from(["float16", "float32", "float64"]),
    st.sampled_from(HOSTS),
    st.sampled_from(["normal", "heavy", "subnormal", "half subnormal", "huge"]),
)
def test_pack(of: tuple[int, Plan], dtype: str, wire: str, host: HostDevice, kind: str) -> None:
    n, plan = of
    scale = {"half subnormal": 1e-6, "huge": 1e37 if dtype == "float32" else 1e300}.get(kind, 1.0)
    x = draw(kind if kind in KINDS else "normal", n, dtype, n) * np.dtype(dtype).type(scale)
    indices, values = np.empty(plan.total, np.uint32), np.empty(plan.total, dtype)
    REFERENCE.select(x, plan, indices, values)
    x[indices] = 0
    results = []
    for device in (REFERENCE, host):
        size = message_bytes(plan.total, plan.dense_total, np.dtype(wire).itemsize)
        message = Message.blank(np.empty(size, np.uint8), plan.total, plan.dense_total, wire)
        left = x.copy()
        device.pack(left, plan, indices, values.copy(), message)
        results.append((left, message.buffer))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


@st.composite
def messages(draw: Any) -> tuple[int, Array, Messages]:
    n = draw(st.sampled_from([1, 7, 1000, 16384, 40_000]))
    ranks = draw(st.integers(1, 9))
    wire = draw(st.sampled_from(["float16", "float32", "float64"]))
    dense = np.array([[n // 3, n // 2]] if draw(st.booleans()) else [], np.int64).reshape(-1, 2)
    seed = draw(st.integers(0, 99))
    return n, dense, gathered(n, ranks, wire, dense, seed)


def gathered(n: int, ranks: int, wire: str, dense: Array, seed: int) -> Messages:
    rng = np.random.default_rng(seed)
    further = int((dense[:, 1] - dense[:, 0]).sum())
    buffers = []
    for _ in range(ranks):
        count = int(rng.integers(0, min(n, 2000) + 1))
        size = message_bytes(count, further, np.dtype(wire).itemsize)
        message = Message.blank(np.empty(size, np.uint8), count, further, wire)
        message.indices[:] = np.sort(rng.choice(n, count, replace=False))
        message.values[:] = rng.standard_normal(count + further)
        message.sign(Status.FINE, 0, 0)
        buffers.append(message.buffer)
    starts = np.cumsum([0, *[b.size for b in buffers]])[:-1].tolist()
    return Messages(np.concatenate(buffers), starts, [b.size for b in buffers])


@few
@given(messages(), st.sampled_from(["float32", "float64"]), st.sampled_from(HOSTS))
def test_merge(of: tuple[int, Array, Messages], dtype: str, host: HostDevice) -> None:
    n, dense, every = of
    expected, got = np.full(n, np.nan, dtype), np.full(n, np.nan, dtype)
    assert REFERENCE.merge(every, dense, 3, expected) == host.merge(every, dense, 3, got)
    assert same(expected, got)
    indices, values = host.merge_sparse(every, dense, 3, n, dtype)
    other = REFERENCE.merge_sparse(every, dense, 3, n, dtype)
    assert same(indices, other[0])
    assert same(values, other[1])


def swap(indices: Array) -> None:
    indices[:2] = indices[1::-1].copy()


DAMAGES = {
    "twice the same": lambda indices: np.copyto(indices[1:2], indices[0]),
    "descending": swap,
    "out of range": lambda indices: np.copyto(indices[-1:], 1000),
    "far out of range": lambda indices: np.copyto(indices[3:4], np.uint32(2**32 - 1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("device", [REFERENCE, *HOSTS])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_damaged_message_is_refused_and_nothing_written(device: Any, damage: str, sparse: bool) -> None:
    dense = np.empty((0, 2), np.int64)
    every = gathered(1000, 3, "float32", dense, 7)
    parts = list(every.parts(dense))
    DAMAGES[damage](parts[2][0])
    out = np.full(1000, 5, np.float32)
    with pytest.raises(ExchangeError, match="rank 2"):
        if sparse:
            device.merge_sparse(every, dense, 3, 1000, "float32")
        else:
            device.merge(every, dense, 3, out)
    assert (out == 5).all()


def test_wrong_arguments_are_refused() -> None:
    engine = native.Engine(1, "scalar")
    x, k = np.zeros(10, np.float32), np.zeros(2, np.uint32)
    pieces, counts = np.array([[0, 10, 0]]), np.array([2])
    with pytest.raises(TypeError):
        engine.finite(np.zeros(3, np.int32))
    with pytest.raises(TypeError):
        engine.accumulate(x, None, np.zeros(10, np.float64))
    with pytest.raises(ValueError, match="length"):
        engine.accumulate(x, None, np.zeros(11, np.float32))
    with pytest.raises(ValueError, match="flat"):
        engine.finite(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        engine.divide(np.broadcast_to(np.float32(1), 1), 2)
    with pytest.raises(ValueError, match="room"):
        engine.select(x, pieces, counts, k[:1], x[:1])
    with pytest.raises(ValueError, match="end with the buffer"):
        engine.select(x, np.array([[0, 9, 0]]), counts, k, x[:2])
    with pytest.raises(ValueError, match="less than the size"):
        engine.select(x, pieces, np.array([10]), np.zeros(10, np.uint32), x)
    with pytest.raises(ValueError, match="lie in the buffer"):
        engine.take(x, np.array([10], np.uint32), np.zeros(1, np.float32), False)
    with pytest.raises(ValueError, match="isa"):
        native.Engine(1, "avx1024")
    with pytest.raises(ValueError, match="threads"):
        native.Engine(0, "scalar")


def test_baselines_compute_what_they_say() -> None:
    engine = native.Engine(2, native.isas()[-1])
    x = draw("normal", 100_000, "float32", 0)
    assert native.read_floor(engine, x) == np.abs(x).max()
    residual = np.ones_like(x)
    native.add_floor(engine, x, residual)
    assert same(residual, 1 + x)


@pytest.mark.parametrize("baseline", [native.nth_element_topk, native.radix_topk])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 500, 1999])
def test_baselines_select_the_same(baseline: Any, kind: str, k: int) -> None:
    x = draw(kind, 2000, "float32", 0)
    expected = np.empty(k, np.uint32), np.empty(k, np.float32)
    got = np.empty(k, np.uint32), np.empty(k, np.float32)
    REFERENCE.select(x.copy(), one_group(x.size, k), *expected)
    baseline(x, *got)
    assert same(expected[0], got[0])
    assert same(expected[1], got[1])


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_bins_and_lines_are_the_same_whatever_the_instructions(isa: str, dtype: str) -> None:
    on, layout = HostDevice(2, isa), Layout({"a": 5001, "b": 30}, dtype=dtype)
    for size in (50, 200, 700):
        test_adacomp.same_everywhere(on, layout, size, 2, 0, ties=False)
    test_grassmann.same_everywhere(on, layout, Grassmann(8, 6), 2, 0)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_search_is_the_same_whatever_the_instructions(isa: str, dtype: str) -> None:
    """By the threads' share and by more entries than the sample has."""
    test_thresholds.searches(HostDevice(3, isa), dtype, 100_007)
