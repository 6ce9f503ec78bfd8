"""What can be handed over as a gradient."""

from __future__ import annotations

import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitopk.device.arrays import flat_gradient, host_array
from mpitopk.errors import GradientError
from mpitopk.layout import Layout

LAYOUT = Layout({"w": 6})


class Tensor:
    """As PyTorch's and JAX's arrays on the host: DLPack and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("wrap", [lambda x: x, Tensor, memoryview, lambda x: array.array("f", x)])
def test_memory_is_shared_not_copied(wrap: Any) -> None:
    x = np.arange(6, dtype=np.float32)
    view = flat_gradient(wrap(x), LAYOUT, writable=False)
    np.testing.assert_array_equal(view, x)
    if not isinstance(wrap(x), array.array):
        x[0] = 9
        assert view[0] == 9


def test_bits_of_bfloat16() -> None:
    layout = Layout({"w": 6}, dtype="bfloat16")
    assert flat_gradient(np.zeros(6, np.uint16), layout, writable=False).dtype == np.uint16
    with pytest.raises(GradientError, match="view the bits of bfloat16 as uint16"):
        flat_gradient(np.zeros(6, np.float32), layout, writable=False)


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.zeros(6, ">f4"), "native byte order|dtype"),
        (np.zeros(25, np.uint8)[1:].view(np.float32), "aligned"),
        ([0.0] * 6, "cannot be viewed"),
        (None, "cannot be viewed"),
        ("gradient", "cannot be viewed"),
    ],
)
def test_what_cannot_be_used(x: Any, match: str) -> None:
    with pytest.raises(GradientError, match=match):
        flat_gradient(x, LAYOUT, writable=False)


def test_read_only_gradients_do_unless_they_are_to_be_cleaned() -> None:
    x = np.zeros(6, np.float32)
    x.flags.writeable = False
    assert flat_gradient(x, LAYOUT, writable=False).size == 6
    with pytest.raises(GradientError, match="writable"):
        flat_gradient(x, LAYOUT, writable=True)


def test_arrays_on_a_gpu_are_named() -> None:
    gpu = type("ndarray", (), {"__cuda_array_interface__": {}})()
    with pytest.raises(GradientError, match="is on a GPU"):
        host_array(gpu, "the gradient")


class Refusing(Tensor):
    """As a PyTorch tensor that requires a gradient, a JAX array on a GPU, or anything half-made."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> Any:
        return 1, 0


@pytest.mark.parametrize(
    "error",
    [
        BufferError("requires grad"),
        RuntimeError("on cuda:0"),
        NotImplementedError("layout"),
        AttributeError("x"),
        AssertionError("y"),
    ],
)
def test_what_an_array_says_of_itself_is_passed_on(error: Exception) -> None:
    with pytest.raises(GradientError, match=f"Refusing that cannot be viewed .*{error}"):
        host_array(Refusing(error), "the gradient")


def test_subclasses_of_arrays_are_plain_arrays(tmp_path: Path) -> None:
    x: Any = np.memmap(tmp_path / "x", np.float32, "w+", shape=6)
    for given in (x, np.ma.masked_array(x, mask=[1, 0, 0, 0, 0, 0])):
        view = flat_gradient(given, LAYOUT, writable=True)
        assert type(view) is np.ndarray
        assert np.shares_memory(view, x)
    del given, view, x


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.zeros(5, np.float32), "6 entries, got 5"),
        (np.zeros((2, 3), np.float32), "one dimension, got shape"),
        (np.float32(0), "one dimension|cannot be viewed"),
        (np.zeros(12, np.float32)[::2], "stride of 8 bytes"),
        (np.zeros(6, np.float32)[::-1], "stride of -4 bytes"),
        (np.broadcast_to(np.float32(1), 6), "stride of 0 bytes"),
        (np.zeros(6, np.float64), "float32, got float64"),
        (np.zeros(6, np.complex64), "float32, got complex64"),
        (np.zeros(6, object), "float32, got object"),
        (np.zeros(6, [("a", "f4")]), "float32, got"),
        (b"\0" * 24, "float32, got uint8"),
        (3.5, "cannot be viewed"),
        ({"w": 1}, "cannot be viewed"),
    ],
)
def test_what_does_not_fit(x: Any, match: str) -> None:
    with pytest.raises(GradientError, match=match):
        flat_gradient(x, LAYOUT, writable=False)
