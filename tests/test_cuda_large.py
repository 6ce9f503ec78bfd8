"""The CUDA kernels on more than 2**31 entries: half an hour on a processor, 20 GB, so only when asked for."""

from __future__ import annotations

import os

import devices
import numpy as np
import pytest
from devices import got

from mpitopk.device import open_device
from mpitopk.plan import Plan
from mpitopk.wire import Message, Status, message_bytes

pytestmark = pytest.mark.skipif(
    not os.environ.get("MPITOPK_TEST_LARGE"), reason="takes half an hour: set MPITOPK_TEST_LARGE=1"
)


def test_more_than_two_to_the_31_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected, moved out, and merged again from a message."""
    if devices.STANDIN:
        monkeypatch.setattr("cudasim.standin.MEMORY", 20 << 30)
    n, at = 2**31 + 4100, [0, 4097, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 4099]
    entries = np.array([1, -2, 3, -4, 5, -6], np.float32)
    device = open_device("cuda", 1)
    x = device.zeros(n, "float32")

    def put(i: int, value: np.float32) -> None:
        x[i : i + 1] = device.from_host(np.array([value]))

    def entry(i: int) -> float:
        return float(got(x[i : i + 1])[0])

    for i, value in zip(at, entries, strict=True):
        put(i, value)
    indices, values = device.empty(6, "uint32"), device.empty(6, "float32")
    assert device.select(x, Plan(np.array([[0, n, 0]]), np.array([6])), indices, values)
    assert got(indices).tolist() == at
    assert got(values).tolist() == entries.tolist()
    device.take(x, indices, values, clear=True)
    assert [entry(i) for i in at] == [0] * 6
    put(2**31 + 7, np.float32(9))  # for the merge to clear
    message = Message.blank(device.empty(message_bytes(6, 0, 4), "uint8"), 6, 0, "float32")
    message.indices[:], message.values[:] = indices, values
    message.sign(Status.FINE, 0, 0)
    assert device.merge(message.alone, np.empty((0, 2), np.int64), 2, x) == 6
    assert [entry(i) for i in at] == (entries / 2).tolist()
    assert entry(2**31 + 7) == 0
