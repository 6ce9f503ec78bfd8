"""Where the time of a run went: python profiling/report.py run.json --html run.html

Reads a timeline (MPITOPK_TIMELINE=run.json mpirun ...), or exports of Nsight Systems, one of each rank
(profiling/nsys.py, then nsys export --type sqlite). Prints, in Markdown, what each phase of a step takes, and
who waits for whom. With an option also writes

    --html FILE   one page with pictures, which needs nothing else
    --png FILE    the phases of each rank as bars; needs pip install '.[plot]'
    --csv FILE    milliseconds of each phase, a row for each rank and step
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import events
import page
from phases import Breakdown, Table, beside_table, break_down, mean_series, phase_table, skew_table, verdict
from recording import Recording, RecordingError


def markdown(recording: Recording, found: Breakdown) -> str:
    """Return the report as text."""
    return "\n".join(_markdown(recording, found))


def _markdown(recording: Recording, found: Breakdown) -> Iterator[str]:
    ranks = "rank" if len(found.ranks) == 1 else "ranks"
    scheme = recording.about.get("scheme", "Reports of Nsight Systems")
    yield f"{scheme}: {len(found.ranks)} {ranks}, {len(found.steps)} steps\n"
    yield _table(phase_table(found))
    yield f"{verdict(found)}\n"
    for table in (skew_table(found), beside_table(recording)):
        if table:
            yield _table(table)
    for name, what in page.SERIES.items():
        if values := [mean for mean, _, _ in mean_series(recording, name).values()]:
            yield f"- {what}: {values[0]:.6g} in the first step, {values[-1]:.6g} in the last"
    if found.recording:
        yield f"- recording took {found.recording:.3f} ms a step, which is not counted"
    yield from (f"- {note}" for note in recording.notes)


def _table(rows: Table) -> str:
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], rule, *rows[1:]])


def write_csv(found: Breakdown, path: Path) -> None:
    """Write all times."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "step", *(f"{found.label(phase)}, ms" for phase in found.phases)])
        for rank, steps in zip(found.ranks, found.ms, strict=True):
            for step, times in zip(found.steps, steps, strict=True):
                writer.writerow([rank, step, *(f"{ms:.6f}" for ms in times)])


def main() -> None:
    """Read, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recording", nargs="+", type=Path, help="a timeline, or exports of Nsight Systems")
    for kind in ("html", "png", "csv"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.png and not find_spec("matplotlib"):
        parser.error("--png needs matplotlib: pip install '.[plot]'; --html does without")
    try:
        recording = events.read(options.recording)
    except RecordingError as error:
        sys.exit(f"report.py: {error}")
    found = break_down(recording)
    print(markdown(recording, found))
    try:
        if options.csv:
            write_csv(found, options.csv)
        if options.html:
            options.html.write_text(page.html(recording, found, options.html))
        if options.png:
            import bars

            bars.write(found, options.png)
    except OSError as error:
        sys.exit(f"report.py: {error.filename} cannot be written ({error.strerror}): name a file elsewhere")


if __name__ == "__main__":
    main()
