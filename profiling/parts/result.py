"""What a part of the study has found: tables, what to know of them, and a picture."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Values by the heading of their column, which names the unit."""


@dataclass
class Table:
    """Rows that all have the same columns, and a name for the file."""

    name: str
    title: str
    rows: list[Row]

    def markdown(self) -> str:
        """Return it as text."""
        head = list(self.rows[0])
        lines = [
            head,
            ["---"] + ["---:"] * (len(head) - 1),
            *([shown(v) for v in r.values()] for r in self.rows),
        ]
        return f"{self.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def write(self, folder: Path) -> None:
        """Write it as CSV."""
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)


@dataclass
class Result:
    """One part. `draw` fills a figure of matplotlib, if there is one to fill."""

    name: str
    title: str
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    draw: Callable[[Any], None] | None = None

    def write(self, folder: Path, about: str) -> None:
        """Write tables as CSV, all as Markdown and, with matplotlib, the picture."""
        for table in self.tables:
            table.write(folder)
        if drawn := self.draw is not None and find_spec("matplotlib") is not None:
            self._write_picture(folder / f"{self.name}.png")
        (folder / f"{self.name}.md").write_text("\n".join(self._markdown(about, drawn)))

    def _write_picture(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        assert self.draw is not None
        self.draw(figure)
        figure.savefig(path, dpi=110)

    def _markdown(self, about: str, drawn: bool) -> Iterator[str]:
        yield f"# {self.title}\n"
        yield f"{about}\n"
        if drawn:
            yield f"![{self.title}]({self.name}.png)\n"
        yield from (table.markdown() for table in self.tables)
        yield from (f"- {note}" for note in self.notes)
        yield ""


def shown(value: object) -> str:
    """Return a value for people: three or four digits."""
    if isinstance(value, float):
        return (
            f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2g}"
        )
    return str(value)
