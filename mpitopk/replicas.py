"""Arrays that must be the same on all ranks: copy them, and check that they are."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitopk.agreement import together
from mpitopk.errors import GradientError, ReplicaError

if TYPE_CHECKING:
    from mpitopk.device.base import Device
    from mpitopk.layout import Layout
    from mpitopk.transport import Transport
    from mpitopk.typing import Array


def given(parameters: Any) -> dict[str, Any]:
    """Return what the user has given, by name."""
    if parameters is None:
        raise GradientError("there is no array: take a step that succeeds first, or give arrays")
    if isinstance(parameters, Mapping):
        return {str(name): array for name, array in parameters.items()}
    if isinstance(parameters, list | tuple):
        return {str(i): array for i, array in enumerate(parameters)}
    return {"parameters": parameters}


def mirrored(parameters: Any, device: Device) -> dict[str, Array]:
    """Return the arrays by name, in host memory."""
    arrays = {name: device.mirror(array, f"{name!r}") for name, array in given(parameters).items()}
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise GradientError(f"{name!r} is not contiguous: make a copy")
        if array.dtype.hasobject:
            raise GradientError(f"{name!r} holds Python objects: give an array of numbers")
    return arrays


def split(parameters: Any, arrays: dict[str, Array], layout: Layout) -> dict[str, Array]:
    """Return the arrays, or of a flat one of the layout's size the segments."""
    if not isinstance(parameters, Mapping | list | tuple) and arrays["parameters"].shape == (layout.size,):
        return layout.views(arrays["parameters"])
    return arrays


def broadcast(transport: Transport, parameters: Any, device: Device, root: int) -> None:
    """Overwrite the arrays on all ranks with the root's."""

    def writable() -> dict[str, Array]:
        arrays = mirrored(parameters, device)
        for name, array in arrays.items():
            if not array.flags.writeable:
                raise GradientError(f"{name!r} cannot be written: make a copy")
        if not isinstance(root, Integral) or not 0 <= root < transport.size:
            raise GradientError(f"root is {root!r}: give a rank from 0 to {transport.size - 1}")
        return arrays

    arrays = together(
        transport.gather_objects, transport.rank, writable, lambda arrays: (root, _forms(arrays))
    )
    for rank, (theirs, _) in enumerate(arrays.every):
        if theirs != arrays.every[0][0]:
            raise GradientError(
                f"rank {rank} has root {theirs}, rank 0 has {arrays.every[0][0]}: give every rank the same"
            )
    _require_equal_forms([forms for _, forms in arrays.every], root)
    for array in arrays.mine.values():
        transport.broadcast(array, root)
    for name, array in given(parameters).items():
        device.restore(array, arrays.mine[name])


def compare(transport: Transport, parameters: Any, layout: Layout, device: Device) -> None:
    """Raise `ReplicaError` on all ranks unless the arrays have the same bits everywhere."""

    def read() -> dict[str, Array]:
        return split(parameters, mirrored(parameters, device), layout)

    arrays = together(transport.gather_objects, transport.rank, read, _forms)
    _require_equal_forms(arrays.every, 0)
    digests = transport.gather_objects(
        [blake2b(a.reshape(-1).view(np.uint8).data, digest_size=16).digest() for a in arrays.mine.values()]
    )
    for i, name in enumerate(arrays.mine):
        others = [str(r) for r, theirs in enumerate(digests) if theirs[i] != digests[0][i]]
        if others:
            raise ReplicaError(
                f"{name!r} differs on rank {', '.join(others)} from rank 0: broadcast the parameters at "
                "the start, and apply the same update on every rank"
            )


def _forms(arrays: dict[str, Array]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, a.shape, str(a.dtype)) for name, a in arrays.items()]


def _require_equal_forms(every: list[Any], root: int) -> None:
    for rank, theirs in enumerate(every):
        if theirs != every[root]:
            raise GradientError(
                f"the arrays of rank {rank} differ from those of rank {root} in name, shape or dtype: "
                "give every rank the same"
            )
