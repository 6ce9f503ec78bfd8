"""The simulator that runs CUDA kernels on a processor: it computes right, and finds planted faults."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import cache

import cudasim
import numpy as np
import pytest
from cudasim import LaunchError, Module
from cudasim.faults import REFUSED, SOURCE, WRONG

FOUND = cudasim.FOUND
LANGUAGE = SOURCE.with_name("language.cu")

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)

# The fault, the macro that plants it where there is a clean twin, and what shows it in each lane:
# 0 is nothing.
FAULTS = {
    ("out_of_bounds", None): {"asan": FOUND},
    ("shared_out_of_bounds", None): {"check": FOUND, "asan": FOUND},
    ("dynamic_out_of_bounds", None): {"asan": FOUND},
    ("reversed", "WITHOUT_BARRIER"): {"fast": WRONG, "check": WRONG, "tsan": FOUND},
    ("swapped", "WITHOUT_BARRIER"): {"fast": WRONG, "check": WRONG, "tsan": FOUND},
    ("counted", "WITHOUT_ATOMIC"): {"tsan": FOUND},
    ("summed", "WITHOUT_FENCE"): {"tsan": FOUND},
    ("never_cleared", None): {"fast": WRONG, "check": WRONG},
    ("divergent_barrier", None): {"fast": REFUSED, "check": REFUSED, "asan": REFUSED},
    ("lanes_that_never_come", None): {"fast": REFUSED, "check": REFUSED, "asan": REFUSED},
    ("misaligned", None): {"check": FOUND, "asan": FOUND},
}
CLEAN = [(fault, lane) for fault, macro in FAULTS if macro for lane in cudasim.LANES]


def launched(lane: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOURCE.with_suffix(".py")), lane, *arguments]
    return subprocess.run(
        command, env=cudasim.preload(lane), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("fault", "lane"), [(fault, lane) for fault, shown in FAULTS.items() for lane in shown]
)
def test_planted_faults_are_found(fault: tuple[str, str | None], lane: str) -> None:
    done = launched(lane, *filter(None, fault))
    assert done.returncode == FAULTS[fault][lane], done.stdout + done.stderr
    if done.returncode == FOUND:
        assert SOURCE.name in done.stderr, "the report names no line of the kernel"


@pytest.mark.parametrize(("kernel", "lane"), CLEAN)
def test_clean_twins_are_quiet(kernel: str, lane: str) -> None:
    done = launched(lane, kernel)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def module() -> Module:
    kernels = ["converted", "lanes", "votes", "atomics", "bits", "scaled<float>", "scaled<double>"]
    return Module(LANGUAGE.read_text(), kernels, path=LANGUAGE.name)


@pytest.mark.parametrize("order", cudasim.ORDERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_templates_and_grids(order: str, workers: int) -> None:
    module().configure(order=order, workers=workers)
    for kind in (np.float32, np.float64):
        x = np.arange(5000, dtype=kind)
        out = np.zeros(5000, kind)
        name = "scaled<float>" if kind is np.float32 else "scaled<double>"
        module().launch(name, (79, 1), 64, [x, out, kind(3), np.int64(5000)])
        assert (out == 3 * x).all()


def test_lanes() -> None:
    x = np.random.default_rng(0).integers(0, 9, 32, dtype=np.uint32)
    out = np.zeros((11, 32), np.uint32)
    module().launch("lanes", 1, 32, [x, out])
    lane = np.arange(32)
    up, down = np.where(lane >= 3, lane - 3, lane), np.where(lane < 29, lane + 3, lane)
    masks = [sum(1 << i for i in lane.tolist() if x[i] == value) for value in x]
    odd = sum(1 << i for i in lane.tolist() if x[i] & 1)
    same = [odd, (x == 7).any(), (x < 8).all()], [x.sum(), x.max(), x.min()]
    rows = [x[np.full(32, 5)], x[up], x[down], x[lane ^ 4], *same[0], masks, *same[1]]
    for function, expected in enumerate(rows):
        assert (out[function] == expected).all(), function


@pytest.mark.parametrize("most", [7, 8])
def test_votes(most: int) -> None:
    x, out = np.arange(96, dtype=np.int32) % (most + 1), np.zeros(3, np.int32)
    module().launch("votes", 1, 96, [x, out])
    assert out.tolist() == [(x > 3).sum(), 1, most < 8]


def test_atomics() -> None:
    module().configure(order="shuffled")
    x = np.random.default_rng(0).integers(1, 1000, 512, dtype=np.uint32)
    out = np.array([0, 0, 5000, 2**32 - 1, 0, 2**31, 0, 0], np.uint32)
    module().launch("atomics", 8, 64, [x, out])
    bitwise = [np.bitwise_and.reduce(x), np.bitwise_or.reduce(x)]
    assert out.tolist() == [x.sum(), x.max(), x.min(), *bitwise, 2**31 - x.sum(), 9, 512]


def test_bits() -> None:
    x = np.array([0, 1, 2, 12, 2**31, 2**32 - 1], np.uint32)
    out = np.zeros((x.size, 5), np.int32)
    module().launch("bits", 1, 4, [x, out, np.int64(x.size)])
    for value, row in zip(x.tolist(), out.tolist(), strict=True):
        ones, first = value.bit_count(), (value & -value).bit_length()
        wide = (value << 20).bit_length()
        assert row == [ones, ones, first, 32 - value.bit_length(), 64 - wide]


def test_conversions_round_as_numpy_does() -> None:
    bits = np.arange(0, 2**32, 9973, dtype=np.uint32)
    x = bits.view(np.float32)
    halves, bfloats, back = np.zeros(x.size, np.float16), np.zeros(x.size, np.uint16), np.zeros_like(x)
    module().launch("converted", -(-x.size // 256), 256, [x, halves, bfloats, back, np.int64(x.size)])
    finite = np.isfinite(x)
    with np.errstate(over="ignore", invalid="ignore"):
        assert (halves[finite].view(np.uint16) == x[finite].astype(np.float16).view(np.uint16)).all()
    assert np.isnan(halves[np.isnan(x)]).all()
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    assert (bfloats[finite] == rounded[finite]).all()
    assert np.array_equal(back, halves.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "grid", "block", "message"),
    [
        (lambda x: [x, x, np.float32(1)], 1, 64, "3 arguments for 4 parameters"),
        (lambda x: [x, x, np.float64(1), np.int64(1)], 1, 64, "float64, the parameter floating of 4"),
        (lambda x: [x, x, np.float32(1), np.int32(1)], 1, 64, "int32, the parameter an integer of 8"),
        (lambda x: [x, np.int64(0), np.float32(1), np.int64(1)], 1, 64, "the parameter a pointer"),
        (lambda x: [x, x, x, np.int64(1)], 1, 64, "argument 2 is an array, the parameter a value"),
        (lambda x: [x, x, np.float32(1), np.int64(1)], 1, 128, "__launch_bounds__"),
        (lambda x: [x, x, np.float32(1), np.int64(1)], 0, 64, "a dimension is zero"),
        (lambda x: [x, x, np.float32(1), np.int64(1)], (1, 65536), 64, "the grid is too large"),
    ],
)  # fmt: skip
def test_launches_that_a_gpu_would_refuse_or_misread(
    arguments: object, grid: object, block: int, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        module().launch("scaled<float>", grid, block, arguments(np.zeros(64, np.float32)))  # type: ignore[operator, arg-type]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(LaunchError, match="there is no kernel 'nothing'"):
        Module(LANGUAGE.read_text(), ["nothing"])
    with pytest.raises(LaunchError, match="there is no kernel 'lanes' in the module"):
        Module(LANGUAGE.read_text(), ["votes"]).launch("lanes", 1, 32, [])
    with pytest.raises(LaunchError, match="do not compile"):
        Module("__global__ void f(int* x) { *x = __activemask(); }", ["f"])


def test_divergence_names_both_lines() -> None:
    lines = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if "__syncthreads" in line]
    faults = Module(SOURCE.read_text(), ["divergent_barrier"])
    with pytest.raises(LaunchError, match="barriers diverge") as caught:
        faults.launch("divergent_barrier", 1, 64, [np.zeros(64, np.int32)])
    assert sum(f"line {line}" in str(caught.value) for line in lines) == 2
