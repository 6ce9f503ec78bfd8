"""What the arrays of the stand-in for CuPy compute: NumPy's functions, queued.

An operation reads its arrays and writes its result when its stream comes to it, without the warnings that a
GPU does not give. An index out of range, for which CuPy takes another, is an error then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

Function = Callable[..., Any]
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


def compute(function: Function, *inputs: Any, out: Any = None) -> Any:
    """Queue a function of arrays and numbers; return where its result will be: `out`, or a new array."""
    arrays = [x for x in inputs if isinstance(x, Arithmetic)]
    for x in inputs:
        if not arrays or not isinstance(x, (Arithmetic, *NUMBERS)):
            raise TypeError(f"Unsupported type {type(x)}")
    hosts = [x._host if isinstance(x, Arithmetic) else x for x in inputs]
    like = _quiet(function, *[np.zeros_like(x) if isinstance(x, np.ndarray) else x for x in hosts])
    if out is None:
        out = type(arrays[0])(like.shape, like.dtype)
    elif not isinstance(out, Arithmetic):
        raise TypeError("the stand-in for CuPy takes only its arrays as out")
    elif out.shape != like.shape:
        raise ValueError(f"out has shape {out.shape}, the result {like.shape}")
    elif not np.can_cast(like.dtype, out.dtype, "same_kind"):
        raise TypeError(f"out is {out.dtype}, the result {like.dtype}")
    reads = [place for x in arrays for place in x._range(False)]
    run = partial(_run, out._host, function, hosts)
    arrays[0]._submit(_name(function), run, [*reads, *out._range(True)])
    return out


def _run(out: np.ndarray, function: Function, inputs: Sequence[Any]) -> None:
    np.copyto(out, _quiet(function, *inputs), casting="same_kind")


def _quiet(function: Function, *inputs: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*inputs)


def _name(function: Any) -> str:
    return str(getattr(function, "func", function).__name__)


def offered(function: Function) -> Function:
    """Return a function of NumPy's as CuPy offers it."""

    def computed(*inputs: Any, out: Any = None) -> Any:
        return compute(function, *inputs, out=out)

    return computed


def gather(a: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    return a[indices]


def scatter(a: np.ndarray, value: Any, *indices: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[indices] = value
    return a


def partition(a: Any, kth: int) -> Any:
    return compute(partial(np.partition, kth=kth), a)


def _operator(function: Function) -> tuple[Function, Function, Function]:
    """Return the methods for x + y, y + x and x += y."""
    return (
        lambda x, y: compute(function, x, y),
        lambda x, y: compute(function, y, x),
        lambda x, y: compute(function, x, y, out=x),
    )


def _reduction(function: Function) -> Function:
    def reduced(self: Any, axis: int | None = None, *, out: Any = None, keepdims: bool = False) -> Any:
        return compute(partial(function, axis=axis, keepdims=keepdims), self, out=out)

    return reduced


class Arithmetic:
    """Operators and reductions, for a class that knows `_host`, `_range` and `_submit`."""

    __hash__ = None
    __array_ufunc__ = None

    __add__, __radd__, __iadd__ = _operator(np.add)
    __sub__, __rsub__, __isub__ = _operator(np.subtract)
    __mul__, __rmul__, __imul__ = _operator(np.multiply)
    __truediv__, __rtruediv__, __itruediv__ = _operator(np.true_divide)
    __and__, __rand__, __iand__ = _operator(np.bitwise_and)
    __matmul__ = _operator(np.matmul)[0]
    __eq__ = _operator(np.equal)[0]
    __gt__ = _operator(np.greater)[0]

    sum, max, mean, argmax = map(_reduction, (np.sum, np.max, np.mean, np.argmax))

    def __float__(self: Any) -> float:
        return float(self.get())

    def __int__(self: Any) -> int:
        return int(self.get())
