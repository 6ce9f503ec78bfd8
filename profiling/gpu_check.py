"""Check a machine with a GPU, in some minutes: python profiling/gpu_check.py

1. the tests of the CUDA device with real CuPy: the same inputs and, to the bit, the results of the host;
2. two ranks on the one GPU;
3. some of the tests under compute-sanitizer, where that is installed;
4. how fast selection and merging are, against adding the gradient to the residual and, where they are
   there, torch.topk and cupy.argpartition: a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from mpitopk.bench.timing import Table, interleave
from mpitopk.device import open_device, why_no_gpu
from mpitopk.device.launch import GRADIENTS, launch, processors
from mpitopk.layout import Layout
from mpitopk.plan import make_plan
from mpitopk.wire import Message, Messages, Status, message_bytes

TESTS = Path(__file__).parents[1] / "tests"
STUDY = 14_728_266
"""Entries of the network in Yoon & Oh, arXiv 2209.08497."""
FILES = ("test_cuda.py", "test_device.py", "test_schemes.py")
SANITIZED = ("test_cuda.py::test_a_sample_that_misleads_leads_to_a_full_selection", "test_device.py")
BLOCK = 1 << 24
RANKS = 8


def check(title: str, command: list[str], seconds: float) -> bool:
    """Run a command on the tests and print a line on how it went; its output only if it failed."""
    environment = os.environ | {"MPITOPK_TEST_DEVICES": "cuda", "MPITOPK_TEST_GPU": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        passed, text = done.returncode == 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        passed, text = False, f"not done after {seconds:.0f} s\n{error.stdout!r}"
    last = next((line for line in reversed(text.splitlines()) if " passed" in line or " failed" in line), "")
    print(f"{'ok  ' if passed else 'FAIL'} {title}: {last or 'no result'} ({time.monotonic() - began:.0f} s)")
    if not passed:
        print(text[-3000:])
    return passed


def checks() -> bool:
    """Run the tests; return whether all have passed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    fine = [check("operations and schemes, real CuPy", [*pytest, *FILES], 240)]
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec:
        on_ranks = [mpiexec, "-n", "2", *pytest, "--with-mpi", "--only-mpi", "-m", "mpi"]
        fine.append(check("two ranks on one GPU", on_ranks, 180))
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        command = [str(sanitizer), f"--tool={tool}", "--error-exitcode=1", *pytest, *SANITIZED]
        fine.append(check(f"compute-sanitizer {tool}", command, 120))
    return all(fine)


def draw(size: int, seed: int) -> Any:
    """Return N(0, 1) numbers on the GPU; beyond `BLOCK` they repeat."""
    block = cupy.asarray(np.random.default_rng(seed).standard_normal(min(size, BLOCK), dtype=np.float32))
    if size <= BLOCK:
        return block
    x = cupy.empty(size, "float32")
    for start in range(0, size, BLOCK):
        x[start : start + BLOCK] = block[: min(BLOCK, size - start)]
    return x


def as_bfloat16(x: Any) -> Any:
    """Return the upper halves of float32, as uint16."""
    return cupy.asarray(np.ascontiguousarray(cupy.asnumpy(x).view(np.uint16)[1::2]))


def gathered(device: Any, plan: Any, size: int) -> Messages:
    """Return the messages of eight ranks."""
    nbytes = message_bytes(plan.total, 0, 4)
    buffer = device.empty(RANKS * nbytes, "uint8")
    heads, starts = bytearray(RANKS * nbytes), [rank * nbytes for rank in range(RANKS)]
    for rank in range(RANKS):
        part = slice(rank * nbytes, (rank + 1) * nbytes)
        message = Message.blank(buffer[part], plan.total, 0, "float32")
        device.select(draw(size, rank), plan, message.indices, message.values)
        message.sign(Status.FINE, 0, 0)
        heads[part.start : part.start + len(message.head)] = message.head
    words = memoryview(heads).cast("q"), [start >> 3 for start in starts]
    return Messages(buffer, starts, [nbytes] * RANKS, words)


def ours(device: Any, size: int, density: float, dtype: str) -> dict[str, Callable[[], object]]:
    """Return our operations on a gradient."""
    plan = make_plan(Layout({"all": size}), density, per_segment=False, dense_below=0)
    x = draw(size, 0)
    gradient = as_bfloat16(x) if dtype == "bfloat16" else x
    residual, spare = device.zeros(size, "float32"), device.zeros(size, "float32")
    indices, values = device.empty(plan.total, "uint32"), device.empty(plan.total, "float32")
    messages, flag = gathered(device, plan, size), device.zeros(1, "uint32")
    ones = np.float32(1), np.float32(1)
    kernel, blocks = f"accumulate<{GRADIENTS[str(gradient.dtype)]}>", 16 * processors()

    def feedback() -> None:
        nonlocal residual, spare
        device.accumulate_select(gradient, residual, spare, plan, indices, values)
        residual, spare = spare, residual

    return {
        "accumulate": lambda: launch(kernel, blocks, gradient, residual, spare, np.int64(size), *ones, flag),
        "accumulate + select": feedback,
        "select": lambda: device.select(x, plan, indices, values),
        "merge of 8": lambda: device.merge(messages, plan.dense, RANKS, spare),
    }


def others(size: int, density: float) -> dict[str, Callable[[], object]]:
    """Return what else there is."""
    x, k = draw(size, 0), max(1, int(density * size + 0.5))
    residual = cupy.zeros_like(x)
    found: dict[str, Callable[[], object]] = {
        "residual += gradient": lambda: cupy.add(residual, x, out=residual)
    }
    if size <= 100_000_000:
        found["cupy.argpartition"] = lambda: cupy.argpartition(-abs(cupy.add(residual, x)), k - 1)[:k]
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        tensor, kept = torch.utils.dlpack.from_dlpack(x), torch.utils.dlpack.from_dlpack(residual)
        found[f"add + torch.topk {torch.__version__}"] = lambda: torch.topk(
            (kept + tensor).abs(), k, sorted=False
        )
    return found


def compare(device: Any, size: int, density: float, dtype: str, repeats: int, *, alone: bool) -> Table:
    """Return the times of a size and density; `alone`: of our operations only."""
    contestants = {} if alone else others(size, density)
    contestants |= ours(device, size, density, dtype)
    baseline = "accumulate" if alone else "residual += gradient"
    table = Table(f"{size} x {dtype}, density {density}", {f"/ {baseline}": baseline})
    synchronize = cupy.cuda.get_current_stream().synchronize

    def finished(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            function()
            synchronize()

        return run

    timed = {name: finished(function) for name, function in contestants.items()}
    table.seconds = interleave(timed, repeats, before=synchronize)
    return table


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[1_000_000, STUDY, 100_000_000, 1_000_000_000])
    parser.add_argument("--density", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1])
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"]
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    options = parser.parse_args()
    if why_no_gpu():
        sys.exit(f"gpu_check.py: {why_no_gpu()}")
    fine = options.no_tests or checks()
    device = open_device("cuda", 1)
    print(f"\nCuPy {cupy.__version__}, driver {cupy.cuda.runtime.driverGetVersion()}, "
          f"{cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)['name'].decode()}\n")  # fmt: skip
    for dtype in options.dtype:
        for size in options.size:
            for density in options.density:
                alone = dtype == "bfloat16"
                print(compare(device, size, density, dtype, options.repeats, alone=alone), flush=True)
                cupy.get_default_memory_pool().free_all_blocks()
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
