"""What ranks have recorded, in one form."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpitopk.errors import MpiTopkError


class RecordingError(MpiTopkError, ValueError):
    """A file is no recording, or an unusable one."""


class Span(NamedTuple):
    """Something that took time on the host, in ns."""

    name: str
    start: float
    stop: float
    step: int


@dataclass
class Track:
    """What one rank has recorded.

    Attributes
    ----------
    spans : list of Span
        Ranges; one may lie within another. `wait` and `transfer` are parts of `exchange`.
    series : dict
        Numbers by step: `bytes.received`, `density.sent`, `density.union`, `residual.norm`.
    beside : dict
        Of `GPU kernels` and `MPI collectives`: when each was asked for and how long it took, in ns.
    """

    rank: int
    source: Path
    spans: list[Span]
    series: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    beside: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def steps(self) -> set[int]:
        """The steps that came to an exchange."""
        return {span.step for span in self.spans if span.name == "exchange"}


@dataclass
class Recording:
    """What some ranks, or all, have recorded; `steps` are those that all of them have."""

    tracks: list[Track]
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracks.sort(key=lambda track: track.rank)
        every = {track.rank: track.steps for track in self.tracks}
        self.steps = sorted(set.intersection(*every.values()))
        counts = {f"rank {rank}": len(steps) for rank, steps in every.items()}
        if not self.steps:
            raise RecordingError(
                f"{self.sources[0]}: the ranks have no step in common ({listed(counts)}): "
                "give recordings of one run, long enough for an exchange"
            )
        if len(set(counts.values())) > 1 or set(self.steps) != every[self.tracks[0].rank]:
            most = max(counts.values())
            fewer = listed({rank: n for rank, n in counts.items() if n < most} or counts)
            self.notes.append(
                f"The ranks have recorded different numbers of steps: {fewer}, others {most}. "
                f"The {len(self.steps)} steps that all have are reported."
            )

    @property
    def sources(self) -> list[Path]:
        """The files."""
        return list(dict.fromkeys(track.source for track in self.tracks))


def listed(counts: dict[str, int]) -> str:
    """Return the first few of some counts as text."""
    shown = [f"{name}: {count}" for name, count in list(counts.items())[:6]]
    return ", ".join(shown + ["..."] * (len(counts) > 6))
