"""Names and shapes laid out in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from operator import index
from typing import TYPE_CHECKING

from mpitopk.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from mpitopk.typing import Array

DTYPES = {"float32": "float32", "float64": "float64", "float16": "float16", "bfloat16": "uint16"}
"""Gradient types, and how their bits are stored."""

MAX_SIZE = 2**32 - 1
"""Indices travel as uint32."""


@dataclass(frozen=True)
class Segment:
    """A named part of the flat buffer: `buffer[start:stop]` in the given shape."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Where the next segment begins."""
        return self.start + self.size


class Layout:
    """Named segments of a flat gradient buffer.

    Parameters
    ----------
    shapes : mapping of str to int or sequence of int
        The shape of each segment, in the order in which they lie in the buffer.
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Type of the gradient. bfloat16 is held as uint16, its bits, where NumPy has no such type.

    Raises
    ------
    LayoutError
        If a shape is malformed, the dtype is unknown or the buffer would exceed 2**32 - 1 entries.

    Examples
    --------
    >>> layout = Layout({"weight": (784, 10), "bias": 10})
    >>> layout.size
    7850
    >>> import numpy as np
    >>> layout.views(np.zeros(layout.size, np.float32))["weight"].shape
    (784, 10)
    """

    def __init__(
        self, shapes: Mapping[str, int | tuple[int, ...] | list[int]], dtype: str = "float32"
    ) -> None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise LayoutError(f"dtype {dtype!r} is unknown: give one of {', '.join(DTYPES)}")
        if not isinstance(shapes, Mapping):
            raise LayoutError(f"the shapes are {shapes!r}: give a mapping of names to shapes")
        if len({str(name) for name in shapes}) < len(shapes):
            raise LayoutError(f"the names {', '.join(map(repr, shapes))} are not all different as texts")
        segments, start = [], 0
        for name, given in shapes.items():
            try:
                shape = (index(given),) if hasattr(given, "__index__") else tuple(map(index, given))
            except (TypeError, ValueError):
                raise LayoutError(
                    f"segment {name!r} has shape {given!r}: give a whole number or several"
                ) from None
            if min(shape, default=0) < 0:
                raise LayoutError(f"segment {name!r} has shape {shape}: no extent may be negative")
            segments.append(Segment(str(name), shape, start))
            start = segments[-1].stop
        if start > MAX_SIZE:
            raise LayoutError(
                f"the layout has {start} entries, more than {MAX_SIZE}: "
                "split it over several layouts, each with its own runtime"
            )
        self.segments = tuple(segments)
        self.size = start
        self.dtype = dtype

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Layout:
        """Return the layout of the given arrays: their names, shapes and (common) dtype."""
        dtypes = sorted({str(a.dtype) for a in arrays.values()})
        if len(dtypes) > 1:
            raise LayoutError(f"the arrays have dtypes {', '.join(dtypes)}: give them one")
        return cls({name: tuple(a.shape) for name, a in arrays.items()}, *dtypes)

    def __repr__(self) -> str:
        return f"<Layout: {len(self.segments)} segments, {self.size} x {self.dtype}>"

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    @property
    def storage(self) -> str:
        """NumPy's name of the type in which the gradient is held."""
        return DTYPES[self.dtype]

    @property
    def accumulator(self) -> str:
        """Type of the residual and of the mean: float64 for float64, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the residual, and of the mean."""
        return self.size * (8 if self.accumulator == "float64" else 4)

    @cached_property
    def digest(self) -> int:
        """64 bits that two layouts share if and only if (almost surely) they are equal."""
        text = repr((self.dtype, [(s.name, s.shape) for s in self.segments]))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def views(self, buffer: Array) -> dict[str, Array]:
        """Return the segments of a flat buffer by name, as writable views in their shapes."""
        if buffer.ndim != 1 or buffer.shape[0] != self.size:
            raise LayoutError(
                f"expected a flat buffer of {self.size} entries, got one of shape {tuple(buffer.shape)}"
            )
        return {s.name: buffer[s.start : s.stop].reshape(s.shape) for s in self.segments}

    def first_difference(self, other: list[tuple[str, tuple[int, ...]]], dtype: str) -> str:
        """Say how a layout, given as names with shapes and a dtype, differs from this one."""
        if dtype != self.dtype:
            return f"dtype {dtype} instead of {self.dtype}"
        mine = [(s.name, s.shape) for s in self.segments]
        for i, (a, b) in enumerate(zip(other, mine, strict=False)):
            if a != b:
                return f"segment {i} is {a[0]!r} {tuple(a[1])} instead of {b[0]!r} {b[1]}"
        return f"{len(other)} segments instead of {len(mine)}"


def layouts_differ(layouts: list[Layout]) -> ConfigError:
    """Return the error for ranks whose layouts are not all the same."""
    rank = next(rank for rank, layout in enumerate(layouts) if layout.digest != layouts[0].digest)
    theirs = [(s.name, s.shape) for s in layouts[rank]]
    difference = layouts[0].first_difference(theirs, layouts[rank].dtype)
    return ConfigError(
        f"the layout of rank {rank} differs from that of rank 0: {difference}; "
        "give every rank the same names and shapes in the same order"
    )
