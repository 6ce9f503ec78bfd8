"""Reads SQLite exports of Nsight Systems; which tables there are depends on what was traced."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from recording import Recording, RecordingError, Span, Track

DOMAIN = "mpitopk"
RANGE, DOMAIN_CREATED = 59, 75
"""Types of NVTX events: a range that was pushed and popped; a domain and its name."""
TABLES = {
    "NVTX_EVENTS": {"start", "end", "eventType", "text", "textId", "domainId", "globalTid", "int64Value"},
    "CUPTI_ACTIVITY_KIND_KERNEL": {"start", "end", "correlationId"},
    "CUPTI_ACTIVITY_KIND_RUNTIME": {"start", "correlationId"},
    "MPI_COLLECTIVES_EVENTS": {"start", "end", "recvSize", "globalTid"},
    "MPI_RANKS": {"globalTid", "rank"},
    "StringIds": {"id", "value"},
}
"""What is read of an export, if it is there. Times are in ns."""
PROFILE = "profile again with `-t nvtx,mpi,cuda`: python profiling/nsys.py prints the command"
ESTIMATE = (
    "Nsight's reports have no common clock: the wait of an exchange is what it takes longer than that of the "
    "rank where it is quickest, of those given (of GTopK, whose ranks exchange in pairs, only roughly)."
)


def process(thread: int) -> int:
    """Return the process that a `globalTid` or `globalPid` is of."""
    return thread >> 24 & 0xFFFFFF


def read(paths: list[Path]) -> Recording:
    """Return what the ranks of one run have recorded."""
    tracks: list[Track] = []
    for number, path in enumerate(paths):
        try:
            _check_length(path)
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as export:
                tracks += _tracks(export, path, _number_in_name(path, number))
        except sqlite3.Error as error:
            raise RecordingError(f"{path} is damaged ({error}): export it again with `nsys export`") from None
    ranks = [track.rank for track in tracks]
    if len(set(ranks)) < len(ranks):
        raise RecordingError(
            f"several of the exports are of rank {max(ranks, key=ranks.count)}: give one of each rank, "
            "all of one run, named with its rank as profiling/nsys.py does (rank0.sqlite, ...)"
        )
    notes = []
    if len(tracks) > 1:
        _split_exchanges(tracks)
        notes.append(ESTIMATE)
    else:
        notes.append("With the report of one rank alone, waiting cannot be told from transfer: give several.")
    shown = set(range(max(ranks) + 1))
    if missing := sorted(shown - set(ranks)):
        notes.append(f"Without rank {', '.join(map(str, missing))}: waiting for it shows as transfer.")
    return Recording(tracks, notes=notes)


def _check_length(path: Path) -> None:
    """Raise `RecordingError` unless the file has all of its pages."""
    with path.open("rb") as file:
        head = file.read(100)
    size = int.from_bytes(head[16:18], "big")
    expected = int.from_bytes(head[28:32], "big") * (65536 if size == 1 else size)
    if len(head) < 100 or path.stat().st_size < expected:
        raise RecordingError(
            f"{path} is truncated, {path.stat().st_size} of {expected or 'at least 512'} bytes: "
            "copy or export it again, and let that end"
        )


def _number_in_name(path: Path, otherwise: int) -> int:
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else otherwise


def _columns(export: sqlite3.Connection, table: str) -> set[str]:
    return {name for _, name, *_ in export.execute(f"PRAGMA table_info({table})")}


def _has(export: sqlite3.Connection, path: Path, table: str) -> bool:
    """Return whether there is a table; raise if it is not as expected."""
    columns = _columns(export, table)
    if columns and (missing := TABLES[table] - columns):
        raise RecordingError(
            f"{path}: table {table} has no column {', '.join(sorted(missing))}: export it with a later nsys"
        )
    return bool(columns)


def _tracks(export: sqlite3.Connection, path: Path, number: int) -> list[Track]:
    """Return what an export has of each process: usually of one."""
    spans = _spans(export, path)
    known = {}
    if _has(export, path, "MPI_RANKS"):
        known = {
            process(thread): rank for thread, rank in export.execute("SELECT globalTid, rank FROM MPI_RANKS")
        }
    if len(spans) > 1 and not spans.keys() <= known.keys():
        raise RecordingError(
            f"{path} has {len(spans)} processes and does not say which ranks they are: trace MPI too, "
            "or make a report of each rank, as profiling/nsys.py does"
        )
    tracks = [Track(known.get(pid, number), path, found) for pid, found in spans.items()]
    for pid, track in zip(spans, tracks, strict=True):
        _add_kernels(export, track, alone=len(spans) == 1)
        _add_collectives(export, track, pid)
    return tracks


def _spans(export: sqlite3.Connection, path: Path) -> dict[int, list[Span]]:
    """Return the ranges of our domain, by process."""
    if not _has(export, path, "NVTX_EVENTS"):
        raise RecordingError(f"{path} has no NVTX events: {PROFILE}")
    text, join = "e.text", ""
    if _has(export, path, "StringIds"):
        text, join = "COALESCE(e.text, s.value)", "LEFT JOIN StringIds s ON e.textId = s.id"
    rows = export.execute(
        f"SELECT {text}, e.start, e.end, e.eventType, e.domainId, e.globalTid, e.int64Value "
        f"FROM NVTX_EVENTS e {join} WHERE e.eventType IN (?, ?) ORDER BY e.start",
        (RANGE, DOMAIN_CREATED),
    ).fetchall()
    names = {
        (process(tid), domain): name for name, _, _, kind, domain, tid, _ in rows if kind == DOMAIN_CREATED
    }
    spans = defaultdict(list)
    for name, start, stop, kind, domain, tid, step in rows:
        if kind == RANGE and stop is not None and names.get((process(tid), domain)) == DOMAIN:
            if step is None:
                raise RecordingError(
                    f"{path}: its ranges have no step: record it with this version of mpitopk"
                )
            spans[process(tid)].append(Span(name or "?", start, stop, step))
    if not spans:
        others = sorted({f"{name!r}" for name in names.values() if name != DOMAIN})
        found = f"only NVTX domains {', '.join(others)}" if others else "no NVTX ranges in a domain"
        raise RecordingError(
            f"{path} has {found}, and nothing of {DOMAIN!r}: profile a rank of a program that takes steps "
            "with mpitopk.Runtime, where `python -c 'import nvtx'` works and NVTX_DISABLE is not set"
        )
    return dict(spans)


def _add_kernels(export: sqlite3.Connection, track: Track, *, alone: bool) -> None:
    """Add the kernels, at the time of the call that launched them where that is known."""
    if not alone or not _has(export, track.source, "CUPTI_ACTIVITY_KIND_KERNEL"):
        return
    at, join = "k.start", ""
    if _has(export, track.source, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        at = "COALESCE(r.start, k.start)"
        join = "LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId"
    query = f"SELECT {at}, k.end - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k {join}"
    track.beside["GPU kernels"] = export.execute(query).fetchall()


def _add_collectives(export: sqlite3.Connection, track: Track, pid: int) -> None:
    """Add MPI's collectives, and the bytes that they have received in each step."""
    if not _has(export, track.source, "MPI_COLLECTIVES_EVENTS"):
        return
    query = "SELECT start, end, COALESCE(recvSize, 0), globalTid FROM MPI_COLLECTIVES_EVENTS ORDER BY start"
    calls = [
        (start, stop, nbytes) for start, stop, nbytes, tid in export.execute(query) if process(tid) == pid
    ]
    track.beside["MPI collectives"] = [(start, stop - start) for start, stop, _ in calls if stop is not None]
    received: defaultdict[int, float] = defaultdict(float)
    exchanges = _exchanges(track)
    exchange = next(exchanges, None)
    for start, _, nbytes in calls:
        while exchange is not None and exchange.stop <= start:
            exchange = next(exchanges, None)
        if exchange is not None and exchange.start <= start:
            received[exchange.step] += nbytes
    if received:
        track.series["bytes.received"] = dict(received)


def _exchanges(track: Track) -> Iterator[Span]:
    return (span for span in track.spans if span.name == "exchange")


def _split_exchanges(tracks: list[Track]) -> None:
    """Add to every exchange the parts wait and transfer, given how long all ranks took for it."""
    quickest: dict[tuple[int, int], float] = {}
    numbered = []
    for track in tracks:
        seen: defaultdict[int, int] = defaultdict(int)
        for span in _exchanges(track):
            key = span.step, seen[span.step]
            seen[span.step] += 1
            quickest[key] = min(span.stop - span.start, quickest.get(key, float("inf")))
            numbered.append((track, span, key))
    for track, span, key in numbered:
        come = span.stop - quickest[key]
        track.spans += [
            Span("wait", span.start, come, span.step),
            Span("transfer", come, span.stop, span.step),
        ]
