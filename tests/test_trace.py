"""NVTX ranges, with a stand-in for the domain, and the seconds that are summed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import handed

from mpitopk import Layout, Runtime, TopK
from mpitopk.schemes import Dense, RandomK
from mpitopk.trace import NORM_EVERY, Trace


class Domain:
    """Records what the domain of nvtx is told."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.pushed: list[Any] = []
        self.depth = self.deepest = 0

    def get_event_attributes(self, message: str, **_: Any) -> SimpleNamespace:
        self.prepared.append(message)
        return SimpleNamespace(message=message)

    def push_range(self, attributes: SimpleNamespace) -> None:
        self.pushed.append(attributes.message)
        self.depth += 1
        self.deepest = max(self.depth, self.deepest)

    def pop_range(self) -> None:
        self.depth -= 1


@pytest.mark.parametrize("scheme", [TopK(0.1), Dense(), RandomK(0.1)])
def test_ranges_are_balanced_and_prepared_once(
    monkeypatch: pytest.MonkeyPatch, scheme: Any, device: str
) -> None:
    from mpi4py import MPI

    domain = Domain()
    monkeypatch.setattr("mpitopk.trace._nvtx_domain", lambda: domain)
    with Runtime(MPI.COMM_SELF, Layout({"w": 100}), scheme, device=device) as runtime:
        prepared = list(domain.prepared)
        for _ in range(3):
            runtime.allreduce(np.ones(100, np.float32), sparse=True)
        bad = np.full(100, np.nan, np.float32)
        with pytest.raises(ArithmeticError):
            runtime.allreduce(bad)
    assert domain.depth == 0
    assert domain.deepest == 1, "no phase is timed within another, and so counted twice"
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


@pytest.mark.parametrize("scheme", [TopK(0.1), Dense(), RandomK(0.1)])
def test_phases_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, scheme: Any, device: str, tmp_path: Path
) -> None:
    """In the timeline none overlaps another, but for the two parts of the exchange."""
    from mpi4py import MPI

    monkeypatch.setenv("MPITOPK_TIMELINE", str(tmp_path / "run.json"))
    with Runtime(MPI.COMM_SELF, Layout({"w": 1000}), scheme, device=device) as runtime:
        for sparse in (False, True, False):
            runtime.allreduce(np.ones(1000, np.float32), sparse)
        seconds = runtime.metrics.seconds
    records = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    events = [record for record in records if record["ph"] == "X"]
    phases = [event for event in events if event["cat"] == "phase"]
    assert [event["args"]["step"] for event in phases] == sorted(e["args"]["step"] for e in phases)
    for before, after in itertools.pairwise(phases):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    exchanges = [event for event in events if event["name"] == "exchange"]
    assert len(exchanges) == 3
    for part in (event for event in events if event["name"] in ("wait", "transfer")):
        whole = exchanges[part["args"]["step"]]
        assert whole["ts"] - 1e-3 <= part["ts"]
        assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1e-3
    for name, total in seconds.items():
        assert total == pytest.approx(sum(e["dur"] for e in events if e["name"] == name) * 1e-6, abs=1e-8)


def test_a_range_ends_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain()
    monkeypatch.setattr("mpitopk.trace._nvtx_domain", lambda: domain)
    trace = Trace()
    with pytest.raises(ZeroDivisionError), trace.range("forward"):
        raise ZeroDivisionError
    assert domain.depth == 0
    assert trace.seconds["forward"] > 0


def test_counts_of_a_step(monkeypatch: pytest.MonkeyPatch, device: str, tmp_path: Path) -> None:
    """Bytes and density of every step, and now and then the norm of the residual, as it is then."""
    from mpi4py import MPI

    monkeypatch.setenv("MPITOPK_TIMELINE", str(tmp_path / "run.json"))
    rng, norms = np.random.default_rng(0), {}
    with Runtime(MPI.COMM_SELF, Layout({"w": 1000}), TopK(0.1), device=device) as runtime:
        for step in range(NORM_EVERY + 2):
            runtime.allreduce(handed(device, rng.standard_normal(1000).astype(np.float32)))
            norms[step] = np.linalg.norm(runtime.state_dict()["residual/w"].astype(np.float64))
        accumulated = runtime.metrics.seconds.get("accumulate", 0)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["otherData"]["ranks"] == 1
    assert content["otherData"]["scheme"] == TopK(0.1).describe()
    assert content["otherData"]["entries"] == 1000
    counts = {(e["name"], e["step"]): e["args"] for e in content["traceEvents"] if e["ph"] == "C"}
    for step in norms:
        assert counts["density", step] == {"sent": 0.1, "union": 0.1}
        assert counts["bytes", step] == {"received": 0}, "there is nobody else"
    assert [step for name, step in counts if name == "residual"] == [0, NORM_EVERY]
    for step in (0, NORM_EVERY):
        assert counts["residual", step]["norm"] == pytest.approx(norms[step], rel=1e-6)
    assert accumulated == 0, "the norm counts as recording, not as a phase"


def test_without_a_timeline_nothing_is_counted(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from mpi4py import MPI

    with Runtime(MPI.COMM_SELF, Layout({"w": 100}), TopK(0.1), device=device) as runtime:
        monkeypatch.setattr(runtime._trace, "_norm", None)
        runtime.allreduce(handed(device, np.ones(100, np.float32)))
        assert runtime._trace.counts == []
        assert "recording" not in runtime.metrics.seconds
        assert runtime._trace.step == 1, "what follows belongs to the next step"
