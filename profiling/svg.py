"""Charts as inline SVG: stacked bars, and lines with a band. Text takes the colour of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

POINTS = 300
"""What a line is reduced to, by mean, least and greatest of neighbours."""


class Part(NamedTuple):
    """A part of a bar."""

    label: str
    value: float
    colour: str


class Line(NamedTuple):
    """A line through the means of points (x, mean, least, greatest)."""

    label: str
    colour: str
    points: Sequence[tuple[float, float, float, float]]
    dashed: bool = False


def stacked(bars: dict[str, list[Part]], x_label: str, y_label: str) -> str:
    """Return horizontal bars on one scale."""
    left, right, row = 56, 884, 30 if len(bars) <= 16 else 18
    top = 26
    bottom = top + row * len(bars)
    most = max(sum(part.value for part in parts) for parts in bars.values()) or 1.0
    scale = (right - left) / most
    drawn = []
    for tick in ticks(0, most):
        x = left + tick * scale
        drawn.append(f'<path class="grid" d="M{x:.1f} {top - 4}V{bottom}"/>')
        drawn.append(_text(x, bottom + 18, number(tick), "middle"))
    for at, (name, parts) in enumerate(bars.items()):
        x, y = float(left), top + row * at
        drawn.append(_text(left - 8, y + row / 2 + 2, name, "end"))
        for part in parts:
            width = part.value * scale
            title = f"{y_label} {name}, {part.label}: {part.value:.3f}"
            drawn.append(
                f'<rect class="bar" x="{x:.3f}" y="{y}" width="{width:.3f}" height="{row - 6}" '
                f'fill="{part.colour}"><title>{escape(title)}</title></rect>'
            )
            x += width
    drawn.append(_text((left + right) / 2, bottom + 38, x_label, "middle"))
    drawn.append(_text(left - 8, top - 8, y_label, "end"))
    return _svg(900, bottom + 46, drawn, f"{x_label} by {y_label}")


def chart(lines: Sequence[Line], x_label: str, y_label: str, text: Callable[[float], str]) -> str:
    """Return lines over a common x; logarithmic where they span more than a factor of 30."""
    lines = [line._replace(points=thinned(line.points)) for line in lines]
    every = [point for line in lines for point in line.points]
    low, high = min(p[2] for p in every), max(p[3] for p in every)
    logarithmic = low > 0 and high / low > 30
    at: Callable[[float], float] = math.log10 if logarithmic else float
    bottom, top = (at(low), at(high)) if logarithmic else (0.0, (high or 1.0) * 1.05)
    first, last = min(p[0] for p in every), max(p[0] for p in every)
    marks = [10.0**e for e in range(math.floor(bottom), math.ceil(top) + 1)] if logarithmic else ticks(0, top)

    def x(value: float) -> float:
        return 62 + 368 * ((value - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return 176 - 164 * (at(value) - bottom) / ((top - bottom) or 1)

    drawn = []
    for mark in marks:
        if 8 <= y(mark) <= 178:
            drawn.append(f'<path class="grid" d="M62 {y(mark):.1f}H430"/>')
            drawn.append(_text(56, y(mark) + 4, text(mark), "end"))
    for mark in ticks(first, last):
        if mark == int(mark):
            drawn.append(_text(x(mark), 194, number(mark), "middle"))
    for line in lines:
        points = line.points
        if any(p[2] < p[3] for p in points):
            edge = [f"{x(p[0]):.1f} {y(p[3]):.1f}" for p in points]
            edge += [f"{x(p[0]):.1f} {y(p[2]):.1f}" for p in reversed(points)]
            drawn.append(f'<path d="M{"L".join(edge)}Z" fill="{line.colour}" opacity=".22"/>')
        path = "L".join(f"{x(p[0]):.1f} {y(p[1]):.1f}" for p in points)
        if len(points) == 1:
            drawn.append(
                f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{line.colour}"/>'
            )
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        drawn.append(f'<path class="line" d="M{path}" stroke="{line.colour}"{dash}/>')
    drawn.append(_text(246, 214, x_label, "middle"))
    return _svg(440, 222, drawn, f"{y_label} by {x_label}")


def thinned(points: Sequence[tuple[float, float, float, float]]) -> list[tuple[float, float, float, float]]:
    """Return at most `POINTS` points; neighbours become one."""
    size = -(-len(points) // POINTS)
    groups = (points[at : at + size] for at in range(0, len(points), size or 1))
    return [
        (g[0][0], sum(p[1] for p in g) / len(g), min(p[2] for p in g), max(p[3] for p in g)) for g in groups
    ]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number for an axis."""
    return f"{value:.6g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, drawn: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    )
