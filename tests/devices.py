"""Devices to test: what is given to one of them in host memory, and got back from it.

"cuda" runs on the stand-in for CuPy in cudasim, unless MPITOPK_TEST_GPU is set: then on a real GPU.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import Any

import numpy as np

from mpitopk.device import open_device, why_no_gpu
from mpitopk.device.base import Device
from mpitopk.wire import Message, Messages

STANDIN = not os.environ.get("MPITOPK_TEST_GPU")
WHY_NO_GPU = why_no_gpu
Array = np.ndarray[Any, Any]


def install_standin() -> None:
    """Bind the CUDA device to the stand-in, and nothing else: what imports CuPy later gets the real one."""
    from cudasim import standin

    standin.install(
        lane=os.environ.get("CUDASIM_LANE", "fast"), policy=os.environ.get("CUDASIM_POLICY", "lazy")
    )
    import mpitopk.device.cuda
    import mpitopk.device.partition

    mpitopk.device.why_no_gpu = mpitopk.device.cuda.usable
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        del sys.modules[name]


def computes(device: str, *dtypes: str) -> bool:
    """Return whether the device computes with these types: a GPU is not used with float64."""
    return device != "cuda" or "float64" not in dtypes


def on_gpu(x: Any) -> Any:
    """Return a NumPy array as one on the GPU; anything else as it is."""
    from mpitopk.device.cuda import cupy

    if not isinstance(x, np.ndarray):
        return x
    if x.ndim == 1 and not x.flags.c_contiguous and x.base is not None:
        return cupy.asarray(x.base)[:: x.strides[0] // x.itemsize]
    return cupy.asarray(x)


def handed(device: str, x: Any) -> Any:
    """Return what a user of that device would hand over."""
    return on_gpu(x) if device == "cuda" else x


def got(x: Any) -> Any:
    """Return a mean, sparse or not, in host memory."""
    if isinstance(x, tuple):
        arrays = map(got, x)
        return type(x)(*arrays) if hasattr(x, "_fields") else tuple(arrays)
    return x.get() if hasattr(x, "get") else x


class Mirrored:
    """A device on a GPU whose operations take arrays in host memory, and write their results back."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._device, name)
        if not callable(operation):
            return operation

        @wraps(operation)
        def mirrored(*arguments: Any, **options: Any) -> Any:
            there = [self._put(x) if self._moves(name, i) else x for i, x in enumerate(arguments)]
            result = operation(*there, **options)
            for mine, theirs in zip(arguments, there, strict=True):
                self._fetch(mine, theirs)
            return got(result) if isinstance(result, tuple) else result

        return mirrored

    @staticmethod
    def _moves(operation: str, argument: int) -> bool:
        """The rows of dense pieces stay on the host."""
        return not (operation in {"merge", "merge_sparse"} and argument == 1)

    def _put(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._device.from_host(x)
        if isinstance(x, Messages):
            return Messages(self._device.from_host(x.buffer), x.starts, x.sizes, x.words)
        if isinstance(x, Message):
            room = self._device.from_host(x.buffer)
            dense = x.values.size - x.indices.size
            return Message.parse(room, x.indices.size, dense, str(x.values.dtype))
        return x

    @staticmethod
    def _fetch(mine: Any, theirs: Any) -> None:
        if isinstance(mine, np.ndarray) and mine is not theirs:
            mine[...] = theirs.get()
        elif isinstance(mine, Message):
            mine.indices[...], mine.values[...] = theirs.indices.get(), theirs.values.get()


def opened(name: str, threads: int) -> Any:
    """Return a device whose operations take arrays in host memory."""
    device = open_device(name, threads)
    return device if device.on_host else Mirrored(device)
