"""The CUDA kernels on more data than a tile, and what the device module may cost in a step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from conftest import DEVICES
from devices import handed, opened
from test_device import gathered, one_group
from worlds import whole

from mpitopk import QSGD, Layout, RandomK, Simulation, TopK
from mpitopk.device import open_device
from mpitopk.device.reference import ReferenceDevice
from mpitopk.device.tiles import TILE, cut
from mpitopk.errors import ExchangeError
from mpitopk.plan import Plan, make_plan
from mpitopk.typing import Array
from mpitopk.wire import Message, Status, message_bytes

needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="MPITOPK_TEST_DEVICES does not name cuda")

N = 20_001 if os.environ.get("CUDASIM_LANE") == "tsan" else 60_001
REFERENCE = ReferenceDevice()


def truncated(x: Array) -> Array:
    """Return bfloat16 as uint16."""
    bits: Array = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits


def room(n: int, k: int) -> tuple[Array, Array, Array]:
    return np.empty(n, np.float32), np.empty(k, np.uint32), np.empty(k, np.float32)


def select_both(on: Any, gradient: Array, residual: Array, plan: Plan) -> Array:
    """Compare a fused selection, and one from what is accumulated, with the reference; return the rest."""
    n, k = residual.size, plan.total
    expected, found = room(n, k), room(n, k)
    for device, (out, *winners) in (REFERENCE, expected), (on, found):
        assert device.accumulate_select(gradient, residual, out, plan, *winners)
    for right, mine in zip(expected, found, strict=True):
        np.testing.assert_array_equal(right.view(np.uint32), mine.view(np.uint32))
    accumulated, winners = np.empty_like(residual), room(0, k)[1:]
    REFERENCE.accumulate(gradient, residual, accumulated)
    assert on.select(accumulated, plan, *winners)
    for right, mine in zip(expected[1:], winners, strict=True):
        np.testing.assert_array_equal(right.view(np.uint32), mine.view(np.uint32))
    return found[0]


SHAPES: dict[str, Any] = {
    "normal": lambda rng: rng.standard_normal(N),
    "heavy tails": lambda rng: rng.standard_cauchy(N),
    "constant": lambda _: np.full(N, -2.5),
    "zeros": lambda _: np.zeros(N),
    "two values": lambda rng: rng.choice([1.0, -3.0], N),
    "few distinct": lambda rng: np.round(rng.standard_normal(N) * 2),
    "at the front": lambda rng: np.where(np.arange(N) < N // 50, 1e3 + np.arange(N), rng.standard_normal(N)),
    "at the end": lambda rng: np.where(
        np.arange(N) > N - N // 50, 1e3 + np.arange(N), rng.standard_normal(N)
    ),
    "ascending": lambda _: np.arange(N),
    "subnormal": lambda rng: rng.integers(0, 1000, N) * 1e-45,
    "one large": lambda rng: np.where(np.arange(N) == 777, 1e26, rng.standard_normal(N)),
}


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 60, 600, 6000, N // 2, N - 1])
def test_exact_for_any_data(shape: str, k: int) -> None:
    """Also step after step, with a floor that the last one has left."""
    on, plan, rng = opened("cuda", 1), one_group(N, k), np.random.default_rng(k)
    residual = np.zeros(N, np.float32)
    for scale in (1, 1.2, 50) if k in (60, 600) else (1,):
        gradient = (SHAPES[shape](rng) * scale).astype(np.float32)
        residual = select_both(on, gradient, residual, plan)


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("per_segment", [False, True])
def test_segments_and_dense_pieces_anywhere(dtype: str, per_segment: bool) -> None:
    """Segments begin at any entry; small ones are sent dense, some are larger than a tile."""
    lengths = [5, 1, 4097, 3, 20_001, 700, 2, 9000, 8192, 64, 4095]
    layout = Layout({str(i): n for i, n in enumerate(lengths)})
    plan = make_plan(layout, 0.02, per_segment=per_segment, dense_below=100)
    on, residual = opened("cuda", 1), np.zeros(layout.size, np.float32)
    for step in range(3):
        x = np.random.default_rng(step).standard_normal(layout.size).astype(np.float32)
        gradient = truncated(x) if dtype == "uint16" else x.astype(dtype)
        residual = select_both(on, gradient, residual, plan)


def test_tiles_cover_everything_once() -> None:
    layout = Layout({"a": 3, "b": 30_000, "c": 7, "d": 9000, "e": 1})
    for per_segment in (False, True):
        plan = make_plan(layout, 0.1, per_segment=per_segment, dense_below=8)
        tiles, groups = cut(plan)
        covered = np.concatenate([np.arange(t["start"], t["start"] + t["size"]) for t in tiles])
        assert sorted(covered.tolist()) == list(range(layout.size))
        assert tiles["size"].max() <= TILE
        for g, group in enumerate(groups):
            mine = tiles[group["first_tile"] : group["last_tile"]]
            assert (mine["group"] == g).all()
            assert mine["size"].sum() == group["size"]
            assert (np.cumsum(mine["size"]) - mine["size"] == mine["before"]).all()


def misleading(n: int) -> Array:
    """Return entries of which the sample sees only large ones; see sample_line in select.cu."""
    lines = max(64, min(4096, n // 512))
    stride = n // lines
    jitter = np.arange(lines, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(8)
    starts = np.arange(lines) * stride + jitter % (stride - 8)
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32) / 100
    x[(starts[:, None] + np.arange(8)).ravel()] += 10
    return x


@needs_cuda
def test_a_sample_that_misleads_leads_to_a_full_selection() -> None:
    """The window lies too high: what was set to zero too early comes back."""
    on, plan, zeros = opened("cuda", 1), one_group(N, 3000), np.zeros(N, np.float32)
    select_both(on, misleading(N), zeros, plan)
    assert on.fallbacks == 2
    select_both(on, np.random.default_rng(0).standard_normal(N).astype(np.float32), zeros, plan)
    assert on.fallbacks == 2


@needs_cuda
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_gradient_that_is_not_aligned(offset: int) -> None:
    on, plan = opened("cuda", 1), one_group(N, 600)
    x = np.random.default_rng(0).standard_normal(N + 4).astype(np.float32)
    gradient = handed("cuda", x)[offset : offset + N]
    residual, out = (handed("cuda", np.zeros(N, np.float32)) for _ in range(2))
    indices, values = handed("cuda", np.zeros(600, np.uint32)), handed("cuda", np.zeros(600, np.float32))
    assert on._device.accumulate_select(gradient, residual, out, plan, indices, values)
    expected = np.empty(600, np.uint32), np.empty(600, np.float32)
    REFERENCE.select(x[offset : offset + N], plan, *expected)
    np.testing.assert_array_equal(indices.get(), expected[0])
    np.testing.assert_array_equal(values.get(), expected[1])


@needs_cuda
@pytest.mark.parametrize("size", [2, 255, 8192, 30_000])
def test_random_indices_are_those_of_the_reference(size: int) -> None:
    pieces = [[0, 5, -1], [5, 5 + size, 0], [5 + size, 305 + size, 1]]
    plan = Plan(np.array(pieces), np.array([size // 2, 7]))
    found, expected = np.empty(plan.total, np.uint32), np.empty(plan.total, np.uint32)
    on = opened("cuda", 1)
    for key in (0, 1, 2**64 - 1):
        on.random_indices(plan, key, found)
        REFERENCE.random_indices(plan, key, expected)
        np.testing.assert_array_equal(found, expected)


def sent(rng: Any, n: int, k: int, dense: int, dtype: str) -> Message:
    """Return a message of k random entries out of n, and of dense ones."""
    message = Message.blank(
        np.empty(message_bytes(k, dense, np.dtype(dtype).itemsize), np.uint8), k, dense, dtype
    )
    message.indices[:] = np.sort(rng.choice(n, k, replace=False))
    message.values[:] = rng.standard_normal(k + dense)
    message.sign(Status.FINE, 0, 0)
    return message


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("ranks", "k"), [(1, 5000), (3, 700), (8, 0), (300, 3)])
def test_merging_over_many_stretches(dtype: str, ranks: int, k: int) -> None:
    """Also with dense pieces that begin, end or lie within a stretch, and with more ranks than threads."""
    n, rng, on = 20_000, np.random.default_rng(0), opened("cuda", 1)
    dense = np.array([[10, 12], [4000, 4100], [4150, 4151], [8190, 12_500], [19_999, 20_000]])
    free = np.setdiff1d(np.arange(n), np.concatenate([np.arange(*row) for row in dense]))
    messages = []
    for rank in range(ranks):
        message = sent(rng, free.size, k + rank % 2, int((dense[:, 1] - dense[:, 0]).sum()), dtype)
        message.indices[:] = free[message.indices]
        messages.append(message)
    every, expected, out = gathered(*messages), np.empty(n, np.float32), np.empty(n, np.float32)
    assert on.merge(every, dense, ranks, out) == REFERENCE.merge(every, dense, ranks, expected)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    right = REFERENCE.merge_sparse(every, dense, ranks, n, "float32")
    for mine, theirs in zip(on.merge_sparse(every, dense, ranks, n, "float32"), right, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@needs_cuda
@pytest.mark.parametrize("indices", [[5, 5], [6, 5], [5, 10_000]])
def test_a_message_with_wrong_indices_is_named_and_nothing_is_written(indices: list[int]) -> None:
    rng, on = np.random.default_rng(0), opened("cuda", 1)
    messages = [sent(rng, 10_000, 2, 0, "float32") for _ in range(4)]
    messages[1].indices[:] = messages[3].indices[:] = indices
    every, out = gathered(*messages), np.full(10_000, 7, np.float32)
    none = np.empty((0, 2), np.int64)
    with pytest.raises(ExchangeError, match="the message of rank 1 has indices"):
        on.merge(every, none, 4, out)
    assert (out == 7).all()
    with pytest.raises(ExchangeError, match="the message of rank 1 has indices"):
        on.merge_sparse(every, none, 4, 10_000, "float32")


@needs_cuda
@pytest.mark.skipif(not devices.STANDIN, reason="only the stand-in counts")
@pytest.mark.parametrize("layers", [1, 300])
@pytest.mark.parametrize("scheme", [TopK(0.01, per_segment=True), RandomK(0.01, per_segment=True)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_launches_few_kernels_and_allocates_nothing(layers: int, scheme: Any, sparse: bool) -> None:
    from cudasim import standin

    layout = Layout({str(i): 30_000 // layers for i in range(layers)})
    simulation = Simulation(1, layout, scheme, device="cuda")
    gradients = [[handed("cuda", g) for g in whole(1, step, layout)] for step in range(4)]
    for gradient in gradients[:2]:
        simulation.allreduce(gradient, sparse)
    standin.reset_counts()
    simulation.allreduce(gradients[2], sparse)
    launches, allocations = list(standin.launches), standin.allocations
    if isinstance(scheme, TopK):
        assert len(launches) <= 8, launches
        assert allocations == 0
    else:
        assert len(launches) <= 10, launches


@needs_cuda
@pytest.mark.skipif(not devices.STANDIN, reason="only the stand-in counts")
def test_rounding_the_values_of_several_ranks_allocates_nothing() -> None:
    from cudasim import standin

    layout = Layout({"w": 30_000})
    simulation = Simulation(3, layout, TopK(0.01, values=QSGD()), device="cuda")
    gradients = [[handed("cuda", g) for g in whole(3, step, layout)] for step in range(3)]
    for gradient in gradients[:2]:
        simulation.allreduce(gradient)
    standin.reset_counts()
    simulation.allreduce(gradients[2])
    assert standin.launches
    assert standin.allocations == 0


@needs_cuda
def test_what_the_gpu_check_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions run; what they measure on a stand-in means nothing."""
    from mpitopk.device import cuda

    monkeypatch.setitem(sys.modules, "cupy", cuda.cupy)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "profiling")
    import gpu_check

    table = gpu_check.compare(open_device("cuda", 1), 20_000, 0.01, "bfloat16", 1, alone=True)
    assert list(table.seconds) == ["accumulate", "accumulate + select", "select", "merge of 8"]
