"""NVTX ranges, with a stand-in for the domain, and the seconds that are summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitopk import Layout, Runtime, TopK
from mpitopk.schemes import Dense, RandomK
from mpitopk.trace import Trace


class Domain:
    """Records what the domain of nvtx is told."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.pushed: list[Any] = []
        self.depth = 0

    def get_event_attributes(self, message: str, **_: Any) -> str:
        self.prepared.append(message)
        return message

    def push_range(self, attributes: str) -> None:
        self.pushed.append(attributes)
        self.depth += 1

    def pop_range(self) -> None:
        self.depth -= 1


@pytest.mark.parametrize("scheme", [TopK(0.1), Dense(), RandomK(0.1)])
def test_ranges_are_balanced_and_prepared_once(monkeypatch: pytest.MonkeyPatch, scheme: Any) -> None:
    from mpi4py import MPI

    domain = Domain()
    monkeypatch.setattr("mpitopk.trace._nvtx_domain", lambda: domain)
    with Runtime(MPI.COMM_SELF, Layout({"w": 100}), scheme) as runtime:
        prepared = list(domain.prepared)
        for _ in range(3):
            runtime.allreduce(np.ones(100, np.float32))
        bad = np.full(100, np.nan, np.float32)
        with pytest.raises(ArithmeticError):
            runtime.allreduce(bad)
    assert domain.depth == 0
    assert domain.prepared == prepared, "attributes are prepared at the start"
    assert domain.pushed.count("exchange") == 4
    assert set(domain.pushed) <= {"accumulate", "select", "pack", "exchange", "merge"}


def test_without_a_profiler_there_is_no_domain() -> None:
    assert Trace().domain is None


def test_user_ranges_are_summed() -> None:
    trace = Trace()
    span = trace.range("forward")
    for _ in range(3):
        with span:
            pass
    assert trace.seconds["forward"] > 0
    assert trace.events is None
