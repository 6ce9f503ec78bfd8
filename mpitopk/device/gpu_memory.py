"""The memory of a GPU, through CuPy: what a user hands over, and what goes to MPI and comes from it."""

from __future__ import annotations

import platform
from functools import cached_property
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpitopk.device.arrays import host_array, misfit
from mpitopk.device.base import Device
from mpitopk.device.launch import THREADS, Array, allocate, clear, copy, processors
from mpitopk.errors import DeviceError, GradientError

if TYPE_CHECKING:
    from mpitopk.layout import Layout
    from mpitopk.typing import Bytes


class GpuMemoryDevice(Device):
    """A device whose arrays are CuPy's, on the current GPU.

    Attributes
    ----------
    direct : bool
        Whether MPI reads and writes memory of the GPU. If not, messages go through pinned host memory.
    """

    on_host = False

    def __init__(self) -> None:
        self.direct = False
        self._sent: Array = np.empty(0, np.uint8)
        self._received = self.empty(0, "uint8")
        self._uploaded: dict[str, tuple[list[int], Array]] = {}

    @property
    def place(self) -> str:
        """The node and the number of the GPU."""
        return f"{platform.node()}: GPU {cupy.cuda.Device().id}"

    def empty(self, size: int, dtype: str) -> Array:
        if np.dtype(dtype) == "float64":
            raise DeviceError("a GPU is not used with float64: give another dtype, or take device='host'")
        return allocate(size, dtype)

    def zeros(self, size: int, dtype: str) -> Array:
        x = self.empty(size, dtype)
        clear(x)
        return x

    def from_host(self, x: Array) -> Array:
        return cupy.asarray(x)

    def mirror(self, x: Any, what: str) -> Array:
        return cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else host_array(x, what)

    def restore(self, x: Any, mirror: Array) -> None:
        if isinstance(x, cupy.ndarray):
            x.set(mirror)

    def exchange_memory(self, nbytes: int) -> Bytes:
        """Return pinned host memory, or memory of the GPU from cudaMalloc itself.

        What other allocators give, such as the user's, cannot always be shared with other processes.
        """
        room = max(1, nbytes)
        try:
            if self.direct:
                memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(room), 0)
                direct: Bytes = cupy.ndarray((nbytes,), np.uint8, memory)
                return direct
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(room), np.uint8, nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(str(error)) from error

    def use_direct(self, direct: bool) -> None:
        """Let messages lie in memory of the GPU from now on, or in host memory."""
        self.direct = direct
        self._sent = self.exchange_memory(0)

    def settle(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def staged(self, x: Array, head: memoryview | None = None) -> Array:
        if self._sent.nbytes < x.nbytes:
            self._sent = self.exchange_memory(x.nbytes)
        to, begin = self._sent[: x.nbytes], 0
        if head is not None:
            begin, front = len(head), np.frombuffer(head, np.uint8)
            to[:begin].set(front) if self.direct else np.copyto(to[:begin], front)
        copy(to[begin:], x.view("uint8")[begin:])
        return to.view(x.dtype)

    def unstaged(self, x: Array, out: Array | None = None) -> Array:
        if out is None:
            if isinstance(x, cupy.ndarray):
                return x
            if self._received.nbytes < x.nbytes:
                self._received = self.empty(x.nbytes, "uint8")
            out = self._received[: x.nbytes].view(x.dtype)
        copy(out, x)
        return out

    def nonzero(self, x: Array) -> tuple[Array, Array]:
        found = cupy.flatnonzero(x)
        indices = self.empty(found.size, "uint32")
        indices[:] = found
        return indices, x[indices]

    def overlap(self, x: Array, y: Array) -> bool:
        first, second = sorted([(x.data.ptr, x.nbytes), (y.data.ptr, y.nbytes)])
        return bool(first[0] + first[1] > second[0] and min(x.nbytes, y.nbytes) > 0)

    def gradient(self, x: Any, layout: Layout, *, writable: bool) -> Array:  # noqa: ARG002 (all are)
        if not isinstance(x, cupy.ndarray):
            try:
                if not hasattr(x, "__cuda_array_interface__"):
                    raise TypeError("it is in host memory, or no array")
                x = cupy.asarray(x)
            except Exception as error:  # whatever a foreign array may raise
                raise GradientError(
                    f"the gradient is a {type(x).__name__} that cannot be viewed as an array on a GPU "
                    f"({error}): give a CuPy array, or make the runtime with device='host'"
                ) from error
        here = cupy.cuda.Device().id
        problem = misfit(x, layout)
        if x.device.id != here:
            problem = f"memory of GPU {here}, got GPU {x.device.id}"
        if problem:
            raise GradientError(f"expected a gradient with {problem}")
        return x

    @cached_property
    def _result(self) -> Array:
        """What a kernel reports: a flag in 4 bytes, how many blocks are done in 4, a total in 8."""
        return self.empty(16, "uint8")

    def _blocks(self, n: int) -> int:
        """Return how many blocks go over n entries, several each where there are many."""
        return min(-(-n // THREADS), 16 * processors())

    def _cleared(self) -> tuple[Array, Array]:
        clear(self._result)
        return self._result[:4].view("uint32"), self._result[8:].view("uint64")

    def _on_gpu(self, name: str, numbers: list[int]) -> Array:
        """Return the numbers of that name, uploaded where they have changed."""
        known, there = self._uploaded.get(name, (None, None))
        if known != numbers:
            there = self.from_host(np.array(numbers, np.int64))
            self._uploaded[name] = numbers, there
        return there
