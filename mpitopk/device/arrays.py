"""Host memory: what a user hands over, as NumPy arrays that share its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpitopk.device.base import TOO_LARGE, Device
from mpitopk.errors import GradientError

if TYPE_CHECKING:
    from mpitopk.layout import Layout
    from mpitopk.plan import Plan
    from mpitopk.typing import Array, Bytes

_UINT = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def host_array(x: object, what: str) -> Array:
    """Return a view of anything in host memory that speaks the buffer protocol or DLPack.

    Raises
    ------
    GradientError
        If it is on a GPU, or not an array at all; lists are refused, since they would be copied.
    """
    if isinstance(x, np.ndarray):
        array = np.asarray(x)  # of a subclass: the plain array
    elif hasattr(x, "__cuda_array_interface__"):
        raise GradientError(
            f"{what} is on a GPU ({type(x).__name__}) and the runtime on the host: take device='cuda', or "
            "copy it to the host first"
        )
    else:
        array = _viewed(x, what)
    if array.dtype.isbuiltin != 1 and array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array


def _viewed(x: object, what: str) -> Array:
    try:
        if hasattr(x, "__array_interface__"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        return np.asarray(memoryview(x))  # type: ignore[arg-type]
    except Exception as error:  # whatever a foreign array may raise
        raise GradientError(
            f"{what} is a {type(x).__name__} that cannot be viewed as an array in host memory "
            f"({error}): give a NumPy array, or one that offers DLPack or the buffer protocol"
        ) from error


def misfit(array: Any, layout: Layout) -> str | None:
    """Return what is expected of a gradient that an array, NumPy's or CuPy's, is not."""
    if array.dtype != layout.storage:
        hint = " (view the bits of bfloat16 as uint16)" if layout.dtype == "bfloat16" else ""
        return f"dtype {layout.storage}, got {array.dtype}{hint}"
    if array.ndim != 1:
        return f"one dimension, got shape {array.shape}: flatten it with reshape(-1)"
    if array.size != layout.size:
        return f"{layout.size} entries, got {array.size}"
    if not array.flags.c_contiguous:
        return f"contiguous entries, got a stride of {array.strides[0]} bytes: make a copy"
    return None


def flat_gradient(x: object, layout: Layout, *, writable: bool) -> Array:
    """Return the gradient as a flat array that fits the layout, or say why it does not."""
    array = host_array(x, "the gradient")
    problem = misfit(array, layout)
    if not problem and not (array.flags.aligned and array.dtype.isnative):
        problem = "aligned entries in native byte order: make a copy"
    if not problem and writable and not array.flags.writeable:
        problem = 'a writable array, since nonfinite="zero" sets entries to zero'
    if problem:
        raise GradientError(f"expected a gradient with {problem}")
    return array


def widen(gradient: Array, dtype: str) -> Array:
    """Return the gradient in the accumulator's type; uint16 holds the bits of bfloat16."""
    if gradient.dtype == np.uint16:
        bits: Array = gradient.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return gradient.astype(dtype, copy=False)


def sound(x: Array) -> bool:
    """Return whether every entry is below `TOO_LARGE`."""
    return bool((np.abs(x) < TOO_LARGE[str(x.dtype)]).all())


def keys(x: Array) -> Array:
    """Return the bit patterns without the sign: unsigned integers in the order of magnitudes."""
    bits: Array = x.view(_UINT[x.itemsize])
    key: Array = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return key


class HostMemoryDevice(Device):
    """A device whose arrays are NumPy's, so that nothing need be copied for MPI or for the user."""

    on_host = True

    def gradient(self, x: object, layout: Layout, *, writable: bool) -> Array:
        return flat_gradient(x, layout, writable=writable)

    def overlap(self, x: Array, y: Array) -> bool:
        return np.may_share_memory(x, y)

    def from_host(self, x: Array) -> Array:
        return x

    def mirror(self, x: object, what: str) -> Array:
        return host_array(x, what)

    def restore(self, x: object, mirror: Array) -> None:
        pass

    def exchange_memory(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def settle(self) -> None:
        pass

    def reserve(self, plan: Plan) -> None:
        pass

    def staged(self, x: Array, head: memoryview | None = None) -> Array:  # noqa: ARG002 (it is there)
        return x

    def nonzero(self, x: Array) -> tuple[Array, Array]:
        indices = np.flatnonzero(x).astype(np.uint32)
        return indices, x[indices]

    def unstaged(self, x: Array, out: Array | None = None) -> Array:
        if out is None or out is x:
            return x
        np.copyto(out, x)
        return out
