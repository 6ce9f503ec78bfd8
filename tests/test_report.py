"""profiling/report.py, on recordings made by hand and on those of real ranks of which one is slow."""

from __future__ import annotations

import csv
import importlib.util
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import events
import numpy as np
import pytest
from phases import Breakdown, beside_table, break_down, mean_series, phase_table, skew_table, verdict
from recordings import export, export_of, needs_gcc, slow_rank, timeline

PROFILING = Path(events.__file__).parent
Ranges = list[tuple[str, float, float, int]]


def table(rows: list[list[str]]) -> dict[str, dict[str, str]]:
    """Return the rows of a table by what they begin with."""
    head, *body = rows
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def report(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROFILING / "report.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def iteration(begin: float, step: int, forward: float, wait: float) -> Ranges:
    """Return the ranges, in ms, of a step that takes `forward + wait + 10`."""
    at = begin + forward
    return [
        ("forward", begin, at, step),
        ("select", at + 1, at + 3, step),
        ("exchange", at + 3, at + 7 + wait, step),
        ("wait", at + 3, at + 3 + wait, step),
        ("transfer", at + 3 + wait, at + 6 + wait, step),
        ("merge", at + 8 + wait, at + 10 + wait, step),
    ]


FAST = [*iteration(0, 0, 4, 6), *iteration(20, 1, 4, 8)]
SLOW = [*iteration(0, 0, 10, 0), *iteration(20, 1, 12, 0)]


def without_parts(ranges: Ranges) -> list[tuple[str, int, int, int]]:
    """Return what Nsight Systems sees of ranges, in ns."""
    return [
        (name, round(1e6 * start), round(1e6 * stop), step)
        for name, start, stop, step in ranges
        if name not in ("wait", "transfer")
    ]


@pytest.fixture
def by_hand(tmp_path: Path) -> events.Recording:
    return events.read([timeline(tmp_path / "run.json", {0: FAST, 1: SLOW}, ranks=2)])


def test_phases(by_hand: events.Recording) -> None:
    """All figures follow from the definition of `iteration`."""
    rows = table(phase_table(break_down(by_hand)))
    steps = (20 + 22 + 20 + 22) / 4
    assert list(rows) == [
        *("forward", "select", "wait", "transfer", "exchange, rest", "merge", "other", "step")
    ]
    for phase, mean, median, slowest, its in [
        ("forward", 7.5, 7, "1", 11),
        ("select", 2, 2, "0", 2),
        ("wait", 3.5, 3, "0", 7),
        ("transfer", 3, 3, "0", 3),
        ("exchange, rest", 1, 1, "0", 1),
        ("merge", 2, 2, "0", 2),
        ("other", 2, 2, "0", 2),
        ("step", steps, steps, "0", 21),
    ]:
        row = rows[phase]
        assert float(row["mean, ms"]) == pytest.approx(mean)
        assert float(row["median, ms"]) == pytest.approx(median)
        assert row["share of the step"] == f"{mean / steps:.1%}"
        assert row["slowest rank"] == slowest
        assert float(row["its mean, ms"]) == pytest.approx(its)


def test_skew(by_hand: events.Recording) -> None:
    found = break_down(by_hand)
    rows = table(skew_table(found))
    assert [rows[rank]["wait, mean ms"] for rank in "01"] == ["7.000", "0.000"]
    assert [rows[rank]["longest"] for rank in "01"] == ["8.000", "0.000"]
    assert rows["0"]["share of its step"] == f"{7 / 21:.1%}"
    assert [rows[rank]["last to come"] for rank in "01"] == ["0% of steps", "100% of steps"]
    assert verdict(found) == (
        "Rank 1 comes last to the exchange in 100% of the steps: the others wait 7.000 ms (median) for it, "
        "33% of their step."
    )


def test_no_rank_is_blamed_for_what_changes(tmp_path: Path) -> None:
    first = [*iteration(0, 0, 4, 6), *iteration(20, 1, 10, 0)]
    second = [*iteration(0, 0, 10, 0), *iteration(20, 1, 4, 6)]
    path = timeline(tmp_path / "run.json", {0: first, 1: second}, ranks=2)
    assert verdict(break_down(events.read([path]))).startswith("No rank stands out")


def test_ranges_within_others_count_once(tmp_path: Path) -> None:
    """As where the user has one around the whole iteration: it keeps what nothing else covers."""
    around: Ranges = [("iteration", 0, 20, 0), *iteration(0, 0, 4, 6)]
    found = break_down(events.read([timeline(tmp_path / "run.json", {0: around}, ranks=1)]))
    rows = table(phase_table(found))
    assert rows["iteration"]["mean, ms"] == "2.000"
    assert rows["other"]["mean, ms"] == "0.000"
    assert rows["step"]["mean, ms"] == "20.000"


def test_ranges_around_several_steps_are_cut(tmp_path: Path) -> None:
    around: Ranges = [("epoch", 0, 50, 0), *iteration(0, 0, 4, 6), *iteration(25, 1, 4, 6)]
    found = break_down(events.read([timeline(tmp_path / "run.json", {0: around}, ranks=1)]))
    epoch = found.ms[0, :, found.phases.index("epoch")]
    np.testing.assert_allclose(epoch, [2, 7], err_msg="5 ms between the steps")
    np.testing.assert_allclose(found.step, [[20, 25]])


def test_recording_is_no_part_of_a_step(tmp_path: Path) -> None:
    between: Ranges = [*iteration(0, 0, 4, 6), ("recording", 20, 30, 1), *iteration(30, 1, 4, 6)]
    found = break_down(events.read([timeline(tmp_path / "run.json", {0: between}, ranks=1)]))
    np.testing.assert_allclose(found.step, [[20, 20]])
    assert found.recording == pytest.approx(5)


@pytest.mark.parametrize("inline", [False, True])
def test_exports_give_the_same_table_as_the_timeline(
    tmp_path: Path, by_hand: events.Recording, inline: bool
) -> None:
    """But for the wait: what an exchange takes longer than that of the quickest rank."""
    paths = [
        export(tmp_path / f"rank{rank}.sqlite", without_parts(ranges), inline=inline)
        for rank, ranges in enumerate((FAST, SLOW))
    ]
    recording = events.read(paths)
    found, expected = break_down(recording), break_down(by_hand)
    assert "quickest" in recording.notes[0]
    own, theirs = table(phase_table(found)), table(phase_table(expected))
    for phase in ("forward", "select", "wait", "merge", "other", "step"):
        assert own[phase] == theirs[phase]
    assert table(skew_table(found)) == table(skew_table(expected))
    assert beside_table(recording) == []


def test_kernels_and_collectives_are_put_to_the_phase_that_asked_for_them(tmp_path: Path) -> None:
    """Kernels run later than they are asked for; without the table of calls, where they run counts."""
    ms = 10**6
    kernels: list[tuple[Any, ...]] = [("start", "end", "correlationId"), (7 * ms, 9 * ms, 1)]
    collectives: list[tuple[Any, ...]] = [
        ("start", "end", "recvSize", "globalTid"),
        *((begin * ms, (begin + 2) * ms, 400, 77 << 24 | 9) for begin in (8, 28)),
        (8 * ms, 9 * ms, 4000, 78 << 24 | 9),
    ]
    more = {"CUPTI_ACTIVITY_KIND_KERNEL": kernels, "MPI_COLLECTIVES_EVENTS": collectives}
    path = export(tmp_path / "a.sqlite", without_parts(FAST), **more)
    recording = events.read([path])
    assert table(beside_table(recording)) == {
        "exchange": {
            "phase": "exchange",
            "GPU kernels, ms a step": "1.000",
            "MPI collectives, ms a step": "2.000",
        }
    }
    assert mean_series(recording, "bytes.received") == {0: (400, 400, 400), 1: (400, 400, 400)}
    export(path, [], CUPTI_ACTIVITY_KIND_RUNTIME=[("start", "correlationId"), (6 * ms, 1)])
    rows = table(beside_table(events.read([path])))
    assert rows["select"]["GPU kernels, ms a step"] == "1.000"
    assert rows["exchange"]["GPU kernels, ms a step"] == "0.000"


def test_one_report_of_all_ranks(tmp_path: Path) -> None:
    """As of `nsys profile mpirun`: MPI's table says which process is which rank."""
    path = export(tmp_path / "job.sqlite", without_parts(FAST), pid=9)
    export(path, without_parts(SLOW), pid=8)
    with pytest.raises(events.RecordingError, match="does not say which ranks"):
        events.read([path])
    export(path, [], MPI_RANKS=[("globalTid", "rank"), (9 << 24 | 1, 0), (8 << 24 | 1, 1)])
    found = break_down(events.read([path]))
    assert found.ranks == [0, 1]
    assert table(skew_table(found))["0"]["wait, mean ms"] == "7.000"


def test_chosen_ranks(tmp_path: Path) -> None:
    paths = [export(tmp_path / f"rank{rank}.sqlite", without_parts(FAST)) for rank in (3, 0)]
    recording = events.read(paths)
    assert [track.rank for track in recording.tracks] == [0, 3]
    assert "Without rank 1, 2" in recording.notes[1]
    alone = events.read(paths[:1])
    assert "cannot be told from transfer" in alone.notes[0]
    assert "exchange" in table(phase_table(break_down(alone)))


def test_different_numbers_of_steps_are_said(tmp_path: Path) -> None:
    path = timeline(tmp_path / "run.json", {0: FAST, 1: SLOW[:6]}, ranks=2)
    recording = events.read([path])
    assert recording.steps == [0]
    assert "different numbers of steps: rank 1: 1, others 2" in recording.notes[0]
    later = [(name, start, stop, step + 5) for name, start, stop, step in FAST]
    with pytest.raises(events.RecordingError, match=r"no step in common \(rank 0: 2, rank 1: 2\)"):
        events.read([timeline(path, {0: FAST, 1: later}, ranks=2)])


def bad_files(folder: Path) -> dict[str, tuple[list[Path], str]]:
    """Files that cannot be reported on, and what is said."""
    good = export(folder / "rank0.sqlite", without_parts(FAST))
    half = folder / "half.sqlite"
    half.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    spoilt = folder / "spoilt.sqlite"
    spoilt.write_bytes(good.read_bytes()[:100] + b"\xff" * (good.stat().st_size - 100))
    run = timeline(folder / "run.json", {0: FAST, 1: SLOW}, ranks=2)
    cut = folder / "cut.json"
    cut.write_text(run.read_text()[:-100])
    old = export(folder / "old.sqlite", [("exchange", 0, 9, 0)])
    with closing(sqlite3.connect(old)) as db, db:
        db.execute("UPDATE NVTX_EVENTS SET int64Value = NULL")
    bare = folder / "bare.sqlite"
    with closing(sqlite3.connect(bare)) as db, db:
        db.execute("CREATE TABLE StringIds (id, value)")
    narrow = folder / "narrow.sqlite"
    with closing(sqlite3.connect(narrow)) as db, db:
        db.execute("CREATE TABLE NVTX_EVENTS (start, end)")

    def text(name: str, content: str) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return {
        "missing": ([folder / "none.json"], "none.json cannot be read .*name a file"),
        "empty file": ([text("empty", "")], "empty is empty"),
        "text": ([text("notes.txt", "hello, world, and so on")], "neither a timeline .*give one of"),
        "a report": ([text("a.nsys-rep", "binary")], "nsys export --type sqlite .*a.nsys-rep"),
        "truncated": ([half], r"half.sqlite is truncated, \d+ of \d+ bytes: copy or export it again"),
        "corrupt": ([spoilt], "spoilt.sqlite is damaged .*export it again"),
        "no NVTX": ([bare], "bare.sqlite has no NVTX events: profile again with `-t nvtx"),
        "columns": ([narrow], "NVTX_EVENTS has no column .*later nsys"),
        "other domain": (
            [export(folder / "torch.sqlite", [("exchange", 0, 9, 0)], domain="torch")],
            "torch.sqlite has only NVTX domains 'of another library', 'torch', and nothing of 'mpitopk'",
        ),
        "no steps": ([old], "old.sqlite: its ranges have no step"),
        "no exchange": (
            [export(folder / "short.sqlite", [("forward", 0, 9, 0)])],
            "short.sqlite: the ranks have no step in common",
        ),
        "same rank": ([good, export(folder / "b-rank0.sqlite", without_parts(SLOW))], "several .* of rank 0"),
        "cut timeline": ([cut], "cut.json is not whole JSON .*run again"),
        "other JSON": ([text("x.json", '{"steps": []}')], "x.json is JSON but no timeline of mpitopk"),
        "other trace": (
            [text("y.json", '{"traceEvents": [{"ph": "X", "pid": 0, "name": "a", "ts": 0, "dur": 1}]}')],
            "y.json is JSON but no timeline of mpitopk",
        ),
        "no events": ([timeline(folder / "none", {0: [], 1: []}, ranks=2)], "none has no events"),
        "no ranks": ([text("z.json", '{"traceEvents": []}')], "z.json has no events"),
        "missing rank": (
            [timeline(folder / "m.json", {0: FAST, 2: SLOW}, ranks=4)],
            "m.json has nothing of rank 1, 3, though there were 4 ranks",
        ),
        "silent rank": (
            [timeline(folder / "s.json", {0: FAST, 1: []}, ranks=2)],
            "s.json has nothing of rank 1",
        ),
        "two timelines": (
            [run, timeline(folder / "2.json", {0: FAST}, ranks=1)],
            "2 files, timelines: give one",
        ),
        "two kinds": ([run, good], "2 files, of two kinds"),
    }


def test_bad_files_are_explained(tmp_path: Path) -> None:
    for name, (paths, says) in bad_files(tmp_path).items():
        with pytest.raises(events.RecordingError) as raised:
            events.read(paths)
        assert re.search(says, str(raised.value)), (name, str(raised.value))


def test_the_command_explains_too(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[")
    done = report(tmp_path, "run.json")
    assert done.returncode == 1
    assert done.stderr.startswith("report.py: run.json is not whole JSON")
    timeline(tmp_path / "run.json", {0: FAST, 1: SLOW}, ranks=2)
    done = report(tmp_path, "run.json", "--html", "no/folder.html")
    assert "no/folder.html cannot be written" in done.stderr


def test_files(tmp_path: Path) -> None:
    timeline(tmp_path / "run.json", {0: FAST, 1: SLOW}, ranks=2)
    done = report(tmp_path, "run.json", "--csv", "run.csv")
    assert done.returncode == 0, done.stderr
    assert "| wait | 3.500 | 3.000 | 16.7% | 0 | 7.000 |" in done.stdout
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"], float(row["wait, ms"])) for row in rows] == [
        *(("0", "0", 6), ("0", "1", 8), ("1", "0", 0), ("1", "1", 0))
    ]
    done = report(tmp_path, "run.json", "--png", "run.png")
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "--png needs matplotlib: pip install '.[plot]'" in done.stderr


@pytest.fixture(scope="module", params=["topk", "dense"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Breakdown]:
    """Twenty steps of three ranks, of which rank 1 takes 30 ms longer; as both instruments see it."""
    folder = tmp_path_factory.mktemp(request.param)
    path, seen = slow_rank(folder, request.param)
    exports = [export_of(folder / f"rank{rank}.sqlite", calls) for rank, calls in enumerate(seen)]
    return {"timeline": break_down(events.read([path])), "Nsight": break_down(events.read(exports))}


@needs_gcc
@pytest.mark.parametrize("instrument", ["timeline", "Nsight"])
def test_waiting_and_transfer_are_told_apart(real: dict[str, Breakdown], instrument: str) -> None:
    """A slow rank shows as waiting of the others, and nowhere else."""
    found = real[instrument]
    medians = np.median(found.ms, axis=1)
    wait, forward = (medians[:, found.phases.index(phase)] for phase in ("wait", "forward"))
    waited = min(wait[0], wait[2])
    assert waited > 4 * wait[1], "only the others wait"
    assert forward[1] > 4 * max(forward[0], forward[2]), "only the slow rank is slow"
    rest = [at for at, phase in enumerate(found.phases) if phase not in ("wait", "forward")]
    assert medians[:, rest].sum(axis=1).max() < waited, "nothing else is"
    rows = table(skew_table(found))
    assert float(rows["1"]["median"]) < float(rows["0"]["median"]) / 4
    assert float(rows["1"]["last to come"].split("%")[0]) > 80
    assert verdict(found).startswith("Rank 1 comes last to the exchange")
    assert table(phase_table(found))["wait"]["slowest rank"] in ("0", "2")


@needs_gcc
def test_both_instruments_agree(real: dict[str, Breakdown]) -> None:
    """On what is measured the same way; both have seen the same run."""
    line, nsight = real["timeline"], real["Nsight"]
    assert nsight.phases == line.phases
    assert nsight.steps == line.steps == list(range(20))
    for phase in ("forward", "wait"):
        at = line.phases.index(phase)
        one, other = (np.median(found.ms[:, :, at], axis=1) for found in (line, nsight))
        np.testing.assert_allclose(one, other, atol=10, err_msg=f"{phase}, where 30 ms are at stake")
