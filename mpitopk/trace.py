"""Where the time goes: NVTX ranges for Nsight Systems, seconds per phase, and a timeline.

The timeline is in the trace event format that Perfetto (ui.perfetto.dev) and chrome://tracing open.
Beside the ranges it has counters, at the end of each step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitopk.agreement import Gather, together
from mpitopk.costs import allreduce_bytes
from mpitopk.errors import ConfigError

if TYPE_CHECKING:
    from mpitopk.device.base import Device
    from mpitopk.metrics import Metrics
    from mpitopk.participant import Participant

NORM_EVERY = 16
"""Steps from one norm of the residual in the timeline to the next: it takes a third of a step to compute."""

PHASES = {
    "norm": "accumulate",
    "accumulate": "accumulate",
    "accumulate_norm": "accumulate",
    "accumulate_select": "select",
    "random_indices": "select",
    "select": "select",
    "move_above": "select",
    "search_above": "select",
    "chunk_maxima": "select",
    "sample": "select",
    "take": "select",
    "select_bins": "select",
    "count_ratios": "select",
    "encode_lines": "select",
    "pack": "pack",
    "pack_bins": "pack",
    "quantize": "pack",
    "merge": "merge",
    "merge_codes": "merge",
    "merge_sparse": "merge",
    "merge_bins": "merge",
    "merge_lines": "merge",
    "nonzero": "merge",
    "combine": "merge",
    "put_back": "merge",
    "divide": "merge",
}
"""The phase that each operation of a device belongs to; exchange is what the driver does."""

COLOURS = {
    "accumulate": "blue",
    "select": "green",
    "pack": "yellow",
    "exchange": "red",
    "merge": "purple",
}


class Event(NamedTuple):
    """Something that took time, in ns of the clock that all ranks share."""

    name: str
    start: int
    stop: int
    step: int


class Count(NamedTuple):
    """What a step has come to, at its end, by the names of the series."""

    name: str
    time: int
    values: dict[str, float]
    step: int


class Range:
    """A named stretch of time, to be entered with `with` any number of times, but not nested."""

    __slots__ = ("_attributes", "_name", "_start", "_step", "_trace")

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._attributes = trace.attributes(name)

    def __enter__(self) -> int:
        """Begin; return the time in ns of the clock that all ranks share."""
        trace = self._trace
        if trace.domain is not None:
            self._attributes.payload = trace.step
            trace.domain.push_range(self._attributes)
        self._step = trace.step
        self._start = start = perf_counter_ns() + trace.offset
        return start

    def __exit__(self, *_: object) -> None:
        stop = perf_counter_ns()
        trace = self._trace
        if trace.domain is not None:
            trace.domain.pop_range()
        trace.add(self._name, self._start, stop + trace.offset, self._step)


class Trace:
    """What one rank records.

    Attributes
    ----------
    seconds : dict
        Total time of each phase and range. `exchange` is split into `wait`, until the slowest rank
        had come, and `transfer`, where that is known.
    offset : int
        What to add to this process's clock to get the one that all ranks share, in ns.
    step : int
        The step that what begins now belongs to: after the end of one, to the next. It is the payload of
        NVTX ranges.
    events : list of Event, or None
        The timeline, if one is kept.
    counts : list of Count
        What belongs to the timeline beside.
    about : dict
        What the timeline is of.
    """

    def __init__(self, *, timeline: bool = False) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.offset = 0
        self.step = 0
        self.events: list[Event] | None = [] if timeline else None
        self.counts: list[Count] = []
        self.about: dict[str, Any] = {}
        self._bytes = 0
        self.domain = _nvtx_domain()
        self._ranges: dict[str, Range] = {}

    def now(self) -> int:
        """Return the time in ns of the clock that all ranks share."""
        return perf_counter_ns() + self.offset

    def range(self, name: str) -> Range:
        """Return the range of that name, prepared once."""
        if name not in self._ranges:
            self._ranges[name] = Range(self, name)
        return self._ranges[name]

    def attributes(self, name: str) -> Any:
        """Return what NVTX wants to know of a range."""
        if self.domain is None:
            return None
        return self.domain.get_event_attributes(
            message=name,
            color=COLOURS.get(name, "white"),
            category="phase" if name in COLOURS else "user",
        )

    def add(self, name: str, start: int, stop: int, step: int) -> None:
        """Record a stretch of time that has passed."""
        self.seconds[name] += (stop - start) * 1e-9
        if self.events is not None:
            self.events.append(Event(name, start, stop, step))

    def exchanged(self, arrival: int, slowest: int) -> None:
        """Split an exchange that has just ended into waiting for the slowest rank and transfer."""
        stop = self.now()
        slowest = min(max(slowest, arrival), stop)
        self.add("wait", arrival, slowest, self.step)
        self.add("transfer", slowest, stop, self.step)

    def end(self, me: Participant, metrics: Metrics) -> None:
        """Take note of a step that has been taken."""
        taken, self.step = self.step, me.rank.step
        if self.events is not None:
            self._count(taken, me, metrics)

    def _count(self, step: int, me: Participant, metrics: Metrics) -> None:
        time = self.now()
        if not self.about:
            layout = me.rank.layout
            dense = allreduce_bytes(layout.nbytes, me.rank.size)
            self.about = {"scheme": me.scheme.describe(), "entries": layout.size, "dense_bytes": dense}
        values: dict[str, dict[str, float]] = {
            "bytes": {"received": metrics.bytes - self._bytes},
            "density": {"sent": metrics.density, "union": metrics.union},
        }
        self._bytes = metrics.bytes
        residual = me.state.saved.get("residual")
        if residual is not None and step % NORM_EVERY == 0:
            with self.range("recording"):
                values["residual"] = {"norm": self._norm(residual)}
        self.counts += [Count(name, time, value, step) for name, value in values.items()]

    def instrument(self, device: Device) -> None:
        """Wrap the operations of a device in the range of their phase."""
        self._norm = device.norm
        for operation, phase in PHASES.items():
            setattr(device, operation, _within(self.range(phase), getattr(device, operation)))


def _within(span: Range, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        with span:
            return function(*args, **options)

    return timed


def _nvtx_domain() -> Any:
    """Return the domain `mpitopk`, or None where nvtx is missing, too old or switched off."""
    try:
        import nvtx

        domain = nvtx.get_domain("mpitopk")
    except (ImportError, AttributeError):
        return None
    return None if type(domain).__name__ == "DummyDomain" else domain


def share_timeline(path: str, trace: Trace, gather: Gather, rank: int) -> None:
    """Let rank 0 write what all ranks have recorded; if it cannot, all raise `ConfigError`."""
    every = gather((trace.events, trace.counts))

    def write() -> bool:
        if rank == 0:
            write_timeline(path, every, trace.about)
        return True

    together(gather, rank, write, lambda done: done)


def write_timeline(path: str, ranks: list[tuple[list[Event], list[Count]]], about: dict[str, Any]) -> None:
    """Write the events of all ranks to one file; a rank is a process, times begin at 0."""
    zero = min((event.start for events, _ in ranks for event in events), default=0)
    records: list[dict[str, Any]] = []
    for rank, (events, counts) in enumerate(ranks):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        records.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        records.extend(
            {
                "ph": "X",
                "name": event.name,
                "cat": "phase" if event.name in COLOURS else "detail",
                "pid": rank,
                "tid": 0,
                "ts": (event.start - zero) / 1e3,
                "dur": (event.stop - event.start) / 1e3,
                "args": {"step": event.step},
            }
            for event in events
        )
        records.extend(
            {
                "ph": "C",
                "name": count.name,
                "pid": rank,
                "ts": (count.time - zero) / 1e3,
                "step": count.step,  # not among the values, which are drawn
                "args": count.values,
            }
            for count in counts
        )
    try:
        about = {"ranks": len(ranks), **about}
        text = json.dumps({"traceEvents": records, "displayTimeUnit": "ms", "otherData": about})
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"MPITOPK_TIMELINE is {path!r}, which cannot be written ({error.strerror}): "
            "name a file in a folder that is there"
        ) from error
