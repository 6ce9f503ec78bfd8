"""The report as one page of HTML, which loads nothing and needs no JavaScript."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import palette
import svg
from phases import beside_table, mean_series, phase_table, skew_table, verdict

if TYPE_CHECKING:
    from phases import Breakdown, Table
    from recording import Recording

SERIES = {
    "bytes.received": "bytes received by a rank in a step",
    "density.sent": "part of the entries that a rank sends",
    "density.union": "part of the entries that some rank sends",
    "residual.norm": "norm of the residual",
}
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8b929a"
STYLE = Path(__file__).with_name("page.css")


def html(recording: Recording, found: Breakdown, path: Path) -> str:
    """Return the page, for a file of that name, from which links go to the recording."""
    parts = "\n".join(_parts(recording, found, path))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>mpitopk: where the time goes</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text()}</style></head><body><main>\n{parts}\n</main></body></html>\n"
    )


def _parts(recording: Recording, found: Breakdown, path: Path) -> Iterator[str]:
    known = recording.about
    entries = f", {known['entries']:,} entries" if "entries" in known else ""
    ranks = "1 rank" if len(found.ranks) == 1 else f"{len(found.ranks)} ranks"
    subtitle = (
        f"{known.get('scheme', 'Reports of Nsight Systems')} on {ranks}{entries}, {len(found.steps)} steps"
    )
    yield f"<header><h1>Where the time goes</h1><p>{escape(subtitle)}</p></header>"
    facts = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span class="soft">{escape(what)}</span></div>'
        for what, value in _facts(recording, found)
    )
    yield f'<div class="facts">{facts}</div>'
    yield f'<section class="said"><p>{escape(verdict(found))}</p></section>'
    yield from _phases(found)
    yield from _skew(found)
    if beside := beside_table(recording):
        yield _section(
            "Asked for within each phase", "What Nsight Systems has seen, mean over ranks.", _table(beside)
        )
    yield f'<div class="pair">{"".join(_charts(recording, found))}</div>'
    yield _section("About this report", "", _notes(recording, found, path))


def _facts(recording: Recording, found: Breakdown) -> Iterator[tuple[str, str]]:
    yield "a step, median", f"{np.median(found.step):.2f} ms"
    if found.wait is not None:
        yield "of it waiting for other ranks, mean", f"{found.wait.mean() / found.step.mean():.0%}"
    if received := mean_series(recording, "bytes.received"):
        mean = sum(value for value, _, _ in received.values()) / len(received)
        dense = recording.about.get("dense_bytes")
        against = f", {mean / dense:.1%} of a dense allreduce's" if dense else ""
        yield f"received in a step{against}", nbytes(mean)
    if sent := mean_series(recording, "density.sent"):
        yield "of the entries are sent, in the last step", f"{list(sent.values())[-1][0]:.3%}"


def _phases(found: Breakdown) -> Iterator[str]:
    colours = palette.colours(found.phases)
    means = found.ms.mean(axis=1)
    bars = {
        str(rank): [
            svg.Part(found.label(phase), ms, colour)
            for (phase, colour), ms in zip(colours.items(), row.tolist(), strict=True)
        ]
        for rank, row in zip(found.ranks, means, strict=True)
    }
    keys = _keys({found.label(phase): colour for phase, colour in colours.items()})
    about = "Mean of a step, from the end of one exchange to the end of the next, as each rank sees it."
    yield _section("Phases of each rank", about, keys + _wide(svg.stacked(bars, "ms a step", "rank")))
    yield _section("Phases of all ranks", "", _table(phase_table(found), "total"))


def _skew(found: Breakdown) -> Iterator[str]:
    if not (table := skew_table(found)) or found.wait is None:
        return
    waits = found.wait.mean(axis=1).tolist()
    orange = {
        str(rank): [svg.Part("wait", ms, palette.PHASES["wait"])]
        for rank, ms in zip(found.ranks, waits, strict=True)
    }
    about = "Who waits, for the last rank to come to the exchange. The one that others wait for waits least."
    bars = _wide(svg.stacked(orange, "ms waited a step", "rank"))
    yield _section("Skew", about, bars + _table(table))


def _charts(recording: Recording, found: Breakdown) -> Iterator[str]:
    received = _line(recording, "bytes.received", "received", BLUE)
    if received.points:
        lines = [received]
        if dense := recording.about.get("dense_bytes"):
            ends = [(point[0], dense, dense, dense) for point in (received.points[0], received.points[-1])]
            lines.append(svg.Line("dense allreduce", GREY, ends, dashed=True))
        yield _chart("Bytes", "Received by a rank in a step.", lines, nbytes)
    density = [
        _line(recording, "density.sent", "sent by a rank", BLUE),
        _line(recording, "density.union", "sent by some rank", ORANGE),
    ]
    if density[0].points:
        yield _chart("Density", "Part of the entries.", density, lambda value: f"{100 * value:.4g} %")
    norm = _line(recording, "residual.norm", "2-norm", GREEN)
    if norm.points:
        text = "What is kept for later, 2-norm; mean, least and greatest rank."
        yield _chart("Norm of the residual", text, [norm], svg.number)
    step = [(s, m, m, m) for s, m in zip(found.steps, found.step.mean(axis=0).tolist(), strict=True)]
    lines = [svg.Line("step", BLUE, step)]
    if found.wait is not None:
        longest = found.wait.max(axis=0).tolist()
        waits = [(s, m, m, m) for s, m in zip(found.steps, longest, strict=True)]
        lines.append(svg.Line("longest wait", ORANGE, waits))
    about = "Of a step, mean of the ranks; and of the rank that waits longest."
    yield _chart("Time", about, lines, lambda value: f"{value:.4g} ms")


def _line(recording: Recording, series: str, label: str, colour: str) -> svg.Line:
    values = mean_series(recording, series)
    return svg.Line(label, colour, [(step, *value) for step, value in values.items()])


def _chart(title: str, about: str, lines: list[svg.Line], text: Callable[[float], str]) -> str:
    keys = _keys({line.label: line.colour for line in lines})
    return _section(title, about, keys + svg.chart(lines, "step", title, text))


def _section(title: str, about: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(about)}</p>' if about else ''}{body}</section>"


def _keys(colours: dict[str, str]) -> str:
    items = (f'<li><i style="background:{c}"></i>{escape(label)}</li>' for label, c in colours.items())
    return f'<ul class="keys">{"".join(items)}</ul>'


def _table(rows: Table, kind: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return _wide(f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _wide(body: str) -> str:
    return f'<div class="scroll">{body}</div>'


def _notes(recording: Recording, found: Breakdown, path: Path) -> str:
    notes = [escape(note) for note in recording.notes]
    if found.recording:
        notes.append(f"Recording took {found.recording:.3f} ms a step, which is not counted.")
    links = ", ".join(
        f'<a href="{quote(os.path.relpath(source, path.parent))}">{escape(source.name)}</a>'
        for source in recording.sources
    )
    where = "ui.perfetto.dev opens it" if "ranks" in recording.about else "Nsight Systems shows its reports"
    notes.append(f"Made from {links}; {where}.")
    return "".join(f"<p>{note}</p>" for note in notes)


def nbytes(value: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
