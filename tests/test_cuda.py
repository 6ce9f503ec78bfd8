"""The CUDA kernels on more data than a tile, and what the device module may cost in a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from conftest import DEVICES
from devices import handed, opened
from worlds import whole

from mpitopk import Layout, RandomK, Simulation, TopK
from mpitopk.device import open_device
from mpitopk.device.reference import ReferenceDevice
from mpitopk.device.tiles import TILE, cut
from mpitopk.plan import Plan, make_plan
from mpitopk.typing import Array

needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="MPITOPK_TEST_DEVICES does not name cuda")

N = 60_001
REFERENCE = ReferenceDevice()
RNG = np.random.default_rng(0)


def one_group(n: int, k: int) -> Plan:
    return Plan(np.array([[0, n, 0]]), np.array([k]))


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
    "normal": lambda: RNG.standard_normal(N),
    "heavy tails": lambda: RNG.standard_cauchy(N),
    "constant": lambda: np.full(N, -2.5),
    "zeros": lambda: np.zeros(N),
    "two values": lambda: RNG.choice([1.0, -3.0], N),
    "few distinct": lambda: np.round(RNG.standard_normal(N) * 2),
    "at the front": lambda: np.where(np.arange(N) < N // 50, 1e3 + np.arange(N), RNG.standard_normal(N)),
    "at the end": lambda: np.where(np.arange(N) > N - N // 50, 1e3 + np.arange(N), RNG.standard_normal(N)),
    "ascending": lambda: np.arange(N),
    "subnormal": lambda: RNG.integers(0, 1000, N) * 1e-45,
    "one large": lambda: np.where(np.arange(N) == 777, 1e30, RNG.standard_normal(N)),
}


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 60, 600, 6000, N // 2, N - 1])
def test_exact_for_any_data(shape: str, k: int) -> None:
    """Also step after step, with a floor that the last one has left."""
    on, plan = opened("cuda", 1), one_group(N, k)
    residual = np.zeros(N, np.float32)
    for scale in (1, 1.2, 50) if k in (60, 600) else (1,):
        gradient = (SHAPES[shape]() * scale).astype(np.float32)
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
    for _ in range(3):
        x = RNG.standard_normal(layout.size).astype(np.float32)
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
    x = RNG.standard_normal(n).astype(np.float32) / 100
    x[(starts[:, None] + np.arange(8)).ravel()] += 10
    return x


@needs_cuda
def test_a_sample_that_misleads_leads_to_a_full_selection() -> None:
    """The window lies too high: what was set to zero too early comes back."""
    on, plan, zeros = opened("cuda", 1), one_group(N, 3000), np.zeros(N, np.float32)
    select_both(on, misleading(N), zeros, plan)
    assert on.fallbacks == 2
    select_both(on, RNG.standard_normal(N).astype(np.float32), zeros, plan)
    assert on.fallbacks == 2


@needs_cuda
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_gradient_that_is_not_aligned(offset: int) -> None:
    on, plan = opened("cuda", 1), one_group(N, 600)
    x = RNG.standard_normal(N + 4).astype(np.float32)
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
def test_what_the_gpu_check_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions run; what they measure on a stand-in means nothing."""
    from mpitopk.device import cuda

    monkeypatch.setitem(sys.modules, "cupy", cuda.cupy)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "profiling")
    import gpu_check

    table = gpu_check.compare(open_device("cuda", 1), 20_000, 0.01, "bfloat16", 1, alone=True)
    assert list(table.seconds) == ["accumulate", "accumulate + select", "select", "merge of 8"]
