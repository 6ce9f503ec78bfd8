"""The CUDA kernels: compiled together by NVRTC, launched by name on the current stream."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import cupy
import numpy as np

from mpitopk.errors import DeviceError

Array: TypeAlias = Any
"""CuPy's arrays; it has no type hints."""

KERNELS = Path(__file__).parent / "kernels"
FILES = (
    "common.cuh",
    "select.cuh",
    "select.cu",
    "full.cu",
    "threshold.cu",
    "merge.cu",
    "elementwise.cu",
    "bins.cu",
    "lines.cu",
    "combine.cu",
    "quantize.cu",
)
GRADIENTS = {"float32": "float", "float16": "Half", "uint16": "Bfloat16"}
VALUES = {4: "float", 2: "Half"}
NAMES = (
    *(f"{k}<{g}>" for k in ("window", "scan", "accumulate", "squares", "all_finite", "zero_nonfinite", "take",
                             "select_bins", "quantize", "count_ratios", "nearest_lines")
      for g in GRADIENTS.values()),
    *(f"{k}<{v}>" for k in ("pack", "merge", "merge_count", "merge_write") for v in VALUES.values()),
    *("refine", "emit", "restore", "digit", "pick", "tally", "settle", "gather"),
    *("common", "add", "add_dense", "split", "put_back"),
    *("draw", "settle_drawn", "gather_drawn", "check", "divide", "heads", "sums", "merge_codes"),
    *("bin_means", "tally_bins", "settle_bins", "pack_bins", "check_bins", "merge_bins", "divide_held"),
    *("aim", "place", "sample_group", "chunk_maxima"),
    *("pack_lines", "merge_lines"),
)  # fmt: skip
THREADS = 256
STRETCH = 4096
"""Entries that a block merges, or adds up."""


def source() -> str:
    """Return all kernels as one text that includes nothing."""
    texts = []
    for name in FILES:
        text = re.sub(r'^#(?:pragma once|include ".*")$', "", (KERNELS / name).read_text(), flags=re.M)
        texts.append(f'#line 1 "{name}"\n{text}')
    return "\n".join(texts)


@cache
def compiled() -> Any:
    """Return the module of all kernels."""
    return cupy.RawModule(code=source(), options=("--std=c++17",), name_expressions=NAMES)


@cache
def kernel(name: str) -> Any:
    """Return one of them."""
    return compiled().get_function(name)


def launch(name: str, blocks: int, *arguments: Any, threads: int = THREADS) -> None:
    """Run a kernel; nothing happens without blocks."""
    if blocks > 0:
        kernel(name)((blocks,), (threads,), arguments)


@cache
def processors() -> int:
    """Return the number of multiprocessors."""
    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


def allocate(size: int, dtype: str) -> Array:
    """Return an uninitialised array, or raise `DeviceError` where there is no memory for it."""
    try:
        return cupy.empty(size, dtype)
    except cupy.cuda.memory.OutOfMemoryError as error:
        device = cupy.cuda.Device()
        wanted, (free, total) = size * np.dtype(dtype).itemsize, device.mem_info
        raise DeviceError(
            f"GPU {device.id} has no memory for {wanted} bytes more ({free} of {total} are free): "
            "lower the density, or let fewer ranks share the GPU"
        ) from error


def clear(x: Array) -> None:
    """Set to zero, on the current stream."""
    if x.size:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, x.nbytes, stream)


def copy(to: Array, x: Array) -> None:
    """Copy bytes, on the current stream; arrays in host memory are best pinned."""
    runtime = cupy.cuda.runtime
    if isinstance(to, np.ndarray):
        kind, address = runtime.memcpyDeviceToHost, to.ctypes.data
    else:
        on_host = isinstance(x, np.ndarray)
        kind, address = runtime.memcpyHostToDevice if on_host else runtime.memcpyDeviceToDevice, to.data.ptr
    source = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    if x.nbytes:
        runtime.memcpyAsync(address, source, x.nbytes, kind, cupy.cuda.get_current_stream().ptr)


def value(x: Array) -> int:
    """Return the only entry, once it is there."""
    return int(cupy.asnumpy(x)[0])
