"""Read what ranks have recorded: from our timeline, or from exports of Nsight Systems."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nsight
from recording import Recording, RecordingError, Span, Track


def read(paths: Iterable[Path]) -> Recording:
    """Return what is in a timeline, or in exports of Nsight Systems; raise `RecordingError`."""
    paths = list(dict.fromkeys(paths))
    exports = [_is_export(path) for path in paths]
    if all(exports):
        return nsight.read(paths)
    if len(paths) > 1:
        raise RecordingError(
            f"{len(paths)} files, {'of two kinds' if any(exports) else 'timelines'}: give one timeline, "
            "which has all ranks, or only exports of Nsight Systems"
        )
    return read_timeline(paths[0])


def _is_export(path: Path) -> bool:
    """Return whether a file is an export of Nsight Systems, rather than a timeline, by how it begins."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read ({error.strerror}): name a file that is there") from None
    if not head:
        raise RecordingError(f"{path} is empty: was the run, or the export, ended before it was written?")
    if head == b"SQLite format 3\0":
        return True
    if head.lstrip()[:1] in (b"{", b"["):
        return False
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise RecordingError(f"{path} is a report of Nsight Systems: nsys export --type sqlite {path}")
    raise RecordingError(
        f"{path} is neither a timeline (MPITOPK_TIMELINE) nor an SQLite export of Nsight Systems "
        "(nsys export --type sqlite): give one of those"
    )


def read_timeline(path: Path) -> Recording:
    """Return what is in a file that MPITOPK_TIMELINE has named."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordingError(
            f"{path} is not whole JSON ({error}): it is written when the runtime is closed; copy it again, "
            "or run again and let it end"
        ) from None
    try:
        tracks = _tracks(path, content["traceEvents"])
        about = dict(content.get("otherData", {}))
    except (LookupError, TypeError, AttributeError) as error:
        raise RecordingError(
            f"{path} is JSON but no timeline of mpitopk ({type(error).__name__}: {error}): "
            "run with MPITOPK_TIMELINE set to a file's name and give that file"
        ) from None
    if not any(track.spans for track in tracks.values()):
        raise RecordingError(
            f"{path} has no events: take steps with `allreduce` before the runtime is closed"
        )
    expected = about.get("ranks", max(tracks) + 1)
    missing = [rank for rank in range(expected) if rank not in tracks or not tracks[rank].spans]
    if missing:
        raise RecordingError(
            f"{path} has nothing of rank {', '.join(map(str, missing))}, though there were {expected} ranks: "
            "was it edited, or written by another program? Give the file as MPITOPK_TIMELINE left it"
        )
    return Recording(list(tracks.values()), about)


def _tracks(path: Path, records: list[dict[str, Any]]) -> dict[int, Track]:
    tracks: dict[int, Track] = {}
    for record in records:
        track = tracks.setdefault(record["pid"], Track(record["pid"], path, []))
        if record["ph"] == "X":
            start = 1e3 * record["ts"]
            step = record["args"]["step"]
            track.spans.append(Span(record["name"], start, start + 1e3 * record["dur"], step))
        elif record["ph"] == "C":
            for name, value in record["args"].items():
                track.series[f"{record['name']}.{name}"][record["step"]] = value
    return tracks
