"""The page of profiling/report.py: whole, alone in the world, and true to the figures; and how it looks."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import events
import numpy as np
import page
import palette
import pytest
import svg
from phases import Breakdown, break_down
from recordings import export, timeline
from test_report import FAST, SLOW, without_parts

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta"}


class Page(HTMLParser):
    """Elements with their attributes, and the text; every tag must be closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def recording(tmp_path: Path) -> events.Recording:
    """Two ranks with all that a timeline may hold."""
    path = timeline(
        tmp_path / "a run.json",
        {0: FAST, 1: SLOW},
        ranks=2,
        scheme="TopK(<&>)",
        entries=1000,
        dense_bytes=4000,
    )
    found = events.read([path])
    for track in found.tracks:
        track.series["bytes.received"] = {0: 400, 1: 200}
        track.series["density.sent"] = {0: 0.1, 1: 0.001}
        track.series["density.union"] = {0: 0.15, 1: 0.002}
        track.series["residual.norm"] = {0: 3.0 + track.rank}
    return found


def written(recording: events.Recording, folder: Path) -> tuple[Path, Breakdown, Page]:
    path, found = folder / "run.html", break_down(recording)
    path.write_text(page.html(recording, found, path))
    return path, found, Page(path.read_text())


def test_it_needs_nothing_else(recording: events.Recording, tmp_path: Path) -> None:
    path, _, parsed = written(recording, tmp_path)
    assert not re.search(r"https?:|//|@import|url\(|<script|\bsrc=", path.read_text())
    assert not parsed.all("link")
    assert not parsed.all("img")
    (link,) = parsed.all("a")
    assert link["href"] == "a%20run.json"
    assert (tmp_path / "a run.json").exists()


def test_what_it_says(recording: events.Recording, tmp_path: Path) -> None:
    _, _, parsed = written(recording, tmp_path)
    for text in (
        "TopK(<&>) on 2 ranks, 1,000 entries, 2 steps",
        "Rank 1 comes last to the exchange in 100% of the steps",
        "300 B" + "received in a step, 7.5% of a dense allreduce's",
        "0.100%" + "of the entries are sent, in the last step",
        "dense allreduce",
        "sent by some rank",
        "Norm of the residual",
        "last to come",
    ):
        assert text in parsed.text, text


def test_bars_are_as_wide_as_phases_are_long(recording: events.Recording, tmp_path: Path) -> None:
    _, found, parsed = written(recording, tmp_path)
    bars = [element for element in parsed.all("rect") if element["class"] == "bar"]
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for bar in bars[: found.ms[:, 0].size]:  # those of the first picture
        assert bar["fill"]
        place = [float(bar[name] or "nan") for name in ("x", "width")]
        rows.setdefault(bar["y"] or "", []).append((bar["fill"], *place))
    assert len(rows) == 2
    colours = palette.colours(found.phases)
    widest = found.ms.mean(axis=1).sum(axis=1).max()
    for row, means in zip(rows.values(), found.ms.mean(axis=1), strict=True):
        assert [colour for colour, _, _ in row] == list(colours.values())
        widths = np.array([width for _, _, width in row])
        np.testing.assert_allclose(widths, means * 828 / widest, atol=1e-3)
        starts = np.array([x for _, x, _ in row])
        np.testing.assert_allclose(starts, 56 + np.append(0, widths.cumsum()[:-1]), atol=2e-3)


def test_a_page_of_exports(tmp_path: Path) -> None:
    """Without what only a timeline has."""
    paths = [export(tmp_path / f"rank{r}.sqlite", without_parts(x)) for r, x in enumerate((FAST, SLOW))]
    _, _, parsed = written(events.read(paths), tmp_path)
    assert [link["href"] for link in parsed.all("a")] == ["rank0.sqlite", "rank1.sqlite"]
    assert "no common clock" in parsed.text
    assert "Density" not in parsed.text


def test_a_page_of_one_rank(tmp_path: Path) -> None:
    path = timeline(tmp_path / "one.json", {0: FAST[:6]}, ranks=1)
    _, _, parsed = written(events.read([path]), tmp_path)
    assert "There is one rank only" in parsed.text
    assert "Skew" not in parsed.text


def test_colours_are_told_apart() -> None:
    """Also by people who confuse red and green: by how light they are, or by blue against yellow."""
    parts = [*palette.PHASES.values(), *palette.OF_THE_USER]
    assert len(set(parts)) == len(parts)
    rgb = np.array([[int(c[at : at + 2], 16) for at in (1, 3, 5)] for c in parts]) / 255
    light, blue = rgb @ [0.3, 0.6, 0.1], rgb @ [-0.5, -0.5, 1]
    seen = np.stack([light, blue], axis=1)
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=2) + np.eye(len(parts))
    assert apart.min() > 0.05


def test_long_runs_are_thinned() -> None:
    points = [(float(x), float(x % 7), float(x % 7) - 1, float(x % 7) + 1) for x in range(10_000)]
    few = svg.thinned(points)
    assert 200 < len(few) <= svg.POINTS
    assert min(p[2] for p in few) == -1
    assert max(p[3] for p in few) == 7
    assert np.mean([p[1] for p in few]) == pytest.approx(np.mean([p[1] for p in points]), rel=0.01)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 36.4), (3, 4.5), (0, 1e7), (0, 2e-4), (5, 5)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = svg.ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert ticks == pytest.approx([float(f"{tick:.2g}") for tick in ticks])


def pixels(path: Path) -> Any:
    """Decode a PNG of 8 bits a channel: rows of red, green and blue."""
    data, at, packed, width, channels = path.read_bytes(), 8, b"", 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, depth, colour = int.from_bytes(body[:4], "big"), body[8], body[9]
            assert depth == 8
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        at += size + 12
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(-1, 1 + width * channels)
    image = np.zeros((len(rows) + 1, width + 1, channels), np.int32)
    for y, row in enumerate(rows, start=1):
        line = row[1:].reshape(width, channels).astype(np.int32)
        up = image[y - 1]
        if row[0] in (0, 2):
            image[y, 1:] = line + (up[1:] if row[0] == 2 else 0) & 255
            continue
        for x in range(1, width + 1):
            left, above, corner = image[y, x - 1], up[x], up[x - 1]
            if row[0] == 1:
                guess = left
            elif row[0] == 3:
                guess = (left + above) // 2
            else:
                sides = np.stack([left, above, corner])
                nearest = np.abs(left + above - corner - sides).argmin(axis=0)
                guess = np.take_along_axis(sides, nearest[None], 0)[0]
            image[y, x] = line[x - 1] + guess & 255
    return image[1:, 1:, :3]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_shows_it(recording: events.Recording, tmp_path: Path) -> None:
    """The bars have their colours, and their lengths are in proportion."""
    path, found, _ = written(recording, tmp_path)
    shot = tmp_path / "page.png"
    assert BROWSER
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=700,1000"]
    command = [
        BROWSER,
        *options,
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        path.as_uri(),
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    image = pixels(shot)
    assert image.shape == (1000, 700, 3)

    def longest(colour: str) -> int:
        """Return how many pixels of a colour there are in the row that has most."""
        rgb = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        return int((np.abs(image - rgb).max(axis=2) <= 2).sum(axis=1).max())

    colours, most = palette.colours(found.phases), found.ms.mean(axis=1).max(axis=0)
    shown = {phase: longest(colours[phase]) for phase in ("forward", "transfer", "select")}
    for phase in ("transfer", "select"):
        at, forward = found.phases.index(phase), found.phases.index("forward")
        assert shown[phase] / shown["forward"] == pytest.approx(most[at] / most[forward], rel=0.15), shown
