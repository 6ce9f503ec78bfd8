"""How many bytes of a GPU's memory kernels move, counted where they run on a processor."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import cudasim
import numpy as np
import pytest
from cudasim import Traffic, standin

from mpitopk.layout import Layout
from mpitopk.plan import make_plan

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)

MOVED = """
struct Row { unsigned x[10]; };

extern "C" __global__ void moved(const float* x, float* out, float* apart, const Row* rows, Row* copies,
                                 unsigned* counts, unsigned long long* total) {
  __shared__ float shared[64];
  const unsigned i = blockIdx.x * 64 + threadIdx.x;
  shared[threadIdx.x] = x[i];
  __syncthreads();
  out[i] = shared[63 - threadIdx.x] + x[255];
  if (threadIdx.x == 0) {
    apart[i] = 1;
    copies[blockIdx.x] = rows[blockIdx.x];
  }
  atomicAdd(&counts[blockIdx.x], 1u);
  atomicAdd(total, 1ull);
  __threadfence();
}
"""


def counting(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, in the lane that counts."""
    with ProcessPoolExecutor(1, get_context("spawn"), standin.install, ("count",)) as pool:
        return pool.submit(function, *arguments).result()


def hand_made() -> list[Traffic]:
    import cupy

    arrays = [cupy.zeros(n, "uint32") for n in (256, 256, 256, 40, 40, 4, 2)]
    cupy.RawModule(code=MOVED).get_function("moved")((4,), (64,), tuple(arrays))
    assert arrays[-2].get().tolist() == [64] * 4
    assert arrays[-1].get().tolist() == [256, 0]
    return cudasim.traffic


def test_every_byte_is_counted() -> None:
    assert counting(hand_made) == [
        Traffic(
            "moved",
            loaded=1024 + 160 + 16 + 8,
            stored=1024 + 4 * 4 + 160 + 16 + 8,
            sectors=(1024 + 160 + 32 + 32) + (1024 + 4 * 32 + 160 + 32 + 32),
            by_blocks=(1024 + 3 * 4 + 160 + 16 + 4 * 8) + (1024 + 4 * 4 + 160 + 16 + 4 * 8),
        )
    ]


def warm_step(n: int, density: float) -> list[Traffic]:
    """Return what the third step of error feedback moves."""
    from mpitopk.device.cuda import CudaDevice

    device, rng = CudaDevice(), np.random.default_rng(0)
    plan = make_plan(Layout({"all": n}), density, per_segment=False, dense_below=0)
    residual, spare = device.zeros(n, "float32"), device.empty(n, "float32")
    winners = device.empty(plan.total, "uint32"), device.empty(plan.total, "float32")
    for _ in range(3):
        gradient = device.from_host(rng.standard_normal(n, np.float32))
        cudasim.traffic.clear()
        assert device.accumulate_select(gradient, residual, spare, plan, *winners)
        residual, spare = spare, residual
    assert device.fallbacks == 0
    return cudasim.traffic


@pytest.mark.parametrize(("density", "n", "most"), [(1e-3, 24 << 20, 12.1), (1e-2, 2 << 20, 12.6)])
def test_selection_moves_little_more_than_accumulation(density: float, n: int, most: float) -> None:
    """An accumulation alone moves 12 bytes an entry: gradient and residual in, their sum out.

    What does not grow with n, 0.3 MB for the sample and 0.05 MB for histograms, is 0.17 bytes an entry
    of 2 million and 0.015 of 25 million. In whole sectors, see `Traffic`, these two steps move more than the
    bars: 12.14 and 12.73.
    """
    steps = counting(warm_step, n, density)
    assert [step.kernel for step in steps] == ["window<float>", "scan<float>", "refine", "emit"]
    table = "\n".join(
        f"{step.kernel:13} loaded {step.loaded / n:7.4f}, stored {step.stored / n:7.4f}, "
        f"in sectors {step.sectors / n:7.4f}, by blocks {step.by_blocks / n:7.4f}"
        for step in steps
    )
    total = sum(step.loaded + step.stored for step in steps) / n
    assert total <= most, f"{total:.4f} bytes an entry:\n{table}"
    assert steps[1].by_blocks <= most * n, f"blocks of the scan load the same:\n{table}"
