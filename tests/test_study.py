"""profiling/study.py: that all parts run, and that what they find is possible; never how fast."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import namespaces
import numpy as np
import pytest
from emulated import skip_without_namespaces

import mpitopk
from mpitopk import Layout, TopK

pytest.importorskip("mpitopk.device._native")

from parts import unions
from parts.contestants import SELECTIONS, TopKBy
from parts.measure import mpiexec
from parts.models import MODELS
from parts.network import crossing

STUDY = Path(namespaces.__file__).with_name("study.py")
PHASES = [
    "forward",
    "backward",
    "accumulate",
    "select",
    "pack",
    "exchange, rest",
    "wait",
    "transfer",
    "merge",
]
PHASES += ["update", "other"]
Rows = list[dict[str, str]]


def rows(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def study(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(STUDY), "--quick", "--output", str(folder), *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the parts that need no root have written."""
    folder = tmp_path_factory.mktemp("study")
    done = study(folder, "--parts", *"abcde")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_texts_and_pictures_are_written(quick: Path) -> None:
    drawn = importlib.util.find_spec("matplotlib") is not None
    for part, name in zip("abcde", ("selection", "breakdown", "skew", "union", "convergence"), strict=True):
        text = (quick / f"{name}.md").read_text()
        assert text.startswith(f"# {part}. ")
        assert f"NumPy {np.__version__}" in text
        assert "its times mean nothing" in text
        assert (f"({name}.png)" in text) == (quick / f"{name}.png").exists() == drawn


def test_all_ways_to_select_have_the_same_winners(quick: Path) -> None:
    found = rows(quick / "selection.csv")
    names = {row["selection"] for row in found}
    assert names >= {"full sort", "argsort", "argpartition", "radix select, one thread", "ours"}
    assert {row["same winners"] for row in found if not row["selection"].startswith("memory")} == {"True"}
    assert {(row["n"], row["k"]) for row in found} == {("10000", "10"), ("100000", "100"), ("100000", "10")}
    for row in found:
        assert float(row["ms"]) > 0
        assert float(row["ns an entry"]) == pytest.approx(1e6 * float(row["ms"]) / float(row["n"]))


def test_the_phases_make_up_the_step(quick: Path) -> None:
    found = rows(quick / "breakdown.csv")
    assert len(found) == 2 * 6 + 3 * 6
    for row in found:
        ms = {phase: float(row[f"{phase}, ms"]) for phase in PHASES}
        assert min(ms.values()) > -0.01, row
        assert sum(ms.values()) <= 1.5 * float(row["step, ms"]), row
        network, dense, ours = (
            row["task"].startswith("the"),
            row["scheme"] == "dense",
            "ours" in row["scheme"],
        )
        assert (ms["forward"] > 0) == (ms["backward"] > 0) == network
        assert (ms["accumulate"] > 0) != (dense or ours)
        assert (ms["select"] > 0) == (ms["pack"] > 0) == (not dense)
        assert min(ms["transfer"], ms["merge"], ms["update"]) > 0


def test_skew_and_waiting_are_told(quick: Path) -> None:
    found = rows(quick / "skew.csv")
    assert [row["selection"] for row in found] == [
        "top-k, full sort",
        "top-k, one-thread radix select",
        "top-k, ours",
    ]
    for row in found:
        skew = [float(row[f"skew {p} %, ms"]) for p in (1, 25, 50, 75, 99)]
        assert skew == sorted(skew)
        assert skew[0] >= 0
        assert 0 <= float(row["waiting, % of the exchange"]) <= 100
    assert len(rows(quick / "waiting.csv")) == 2 * 3


def test_unions_grow_and_have_room_in_all(quick: Path) -> None:
    before = 1.0
    for row in rows(quick / "union.csv"):
        some, none = float(row["75% in common, k"]), float(row["nothing in common, k"])
        assert before < some < none <= float(row["all different, k"]) == float(row["ranks"])
        before = some


def test_unions_are_those_of_the_lineage() -> None:
    """The share in common was chosen by 2 ranks; 4 and 8 follow."""
    for ranks, theirs in unions.LINEAGE.items():
        ours = unions.union(ranks, 100_000, unions.correlated(100_000, unions.SHARE, ranks), 40)
        assert ours == pytest.approx(theirs, rel=0.1), ranks


def test_trainings_are_of_all_settings(quick: Path) -> None:
    found = rows(quick / "convergence.csv")
    densities = [row for row in found if row["varied"] == "density"]
    assert {float(row["density"]) for row in densities if row["scheme"] == "top-k, ours"} == {
        1e-4,
        1e-3,
        0.01,
        0.1,
    }
    assert {row["batch"] for row in found if row["varied"] == "batch"} == {"64", "256", "1024"}
    assert {row["ranks"] for row in found if row["varied"] == "ranks"} == {"2", "4", "8", "16"}
    for row in found:
        assert row["accuracy, %"] == "diverged" or 0 <= float(row["accuracy, %"]) <= 100
        expected = 100 if row["scheme"] == "dense" else 100 * float(row["density"]) * int(row["ranks"])
        assert float(row["bytes, % of dense"]) <= max(1.0, 1.2 * expected)


def test_whole_steps_on_an_emulated_cluster(tmp_path: Path) -> None:
    skip_without_namespaces()
    done = study(tmp_path, "--parts", "f", "--hosts", "3")
    assert done.returncode == 0, done.stderr
    assert "3 hosts" in (tmp_path / "network.md").read_text()
    found = rows(tmp_path / "network.csv")
    networks = {row["network"]: float(row["Gbit/s, measured"]) for row in found}
    assert list(networks) == ["unlimited TCP", "10gbit", "3gbit", "1gbit", "shared memory"]
    assert 0 < networks["1gbit"] < 1.1
    by_scheme = {row["scheme"]: float(row["kB received"]) for row in found if row["density"] == "0.001"}
    assert by_scheme.pop("dense") == pytest.approx(2 * 2 / 3 * 400, rel=1e-3)
    assert set(by_scheme.values()) == {2 * (40 + 100 * 8) / 1000}, "two messages"
    assert len(rows(tmp_path / "break-even.csv")) == 2 * len(by_scheme)


def test_where_there_can_be_no_cluster_the_reason_is_given(tmp_path: Path) -> None:
    """To others than root, that they are not; to root, that the path has no commands but mpiexec."""
    (tmp_path / "mpiexec").symlink_to(mpiexec())
    done = study(tmp_path / "here", "--parts", "f", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (why,) = re.findall("f is left out: (.+)", done.stderr)
    assert "use sudo" in why or "install the package" in why or "need Linux" in why
    assert list((tmp_path / "here").iterdir()) == []


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    done = study(tmp_path, "--size", "vgg")
    assert done.returncode == 2
    assert "--size vgg: expected a number of entries, or one of vgg16, resnet18, lstm" in done.stderr


def test_where_the_order_changes() -> None:
    """Dense takes 1 + 8 / b, another 3 + 2 / b: they meet at b = 3."""
    points = [(b, 1 + 8 / b, 3 + 2 / b) for b in (10.0, 1.0, 2.0)]
    assert crossing(points) == "3.00"
    assert crossing([(b, other, dense) for b, dense, other in points]) == "no single one"
    assert crossing([(b, dense, 0.1) for b, dense, _ in points]) == "none of those measured"
    assert crossing([(b, dense, 99.0) for b, dense, _ in points]) == "all of those measured"


@pytest.mark.parametrize(
    ("name", "entries", "segments"),
    [("vgg16", 14_728_266, 54), ("resnet18", 11_173_962, 62), ("lstm", 28_949_319, 14)],
)
def test_models_have_the_sizes_of_the_study(name: str, entries: int, segments: int) -> None:
    layout = MODELS[name]()
    assert (layout.size, len(layout.segments)) == (entries, segments)


@pytest.mark.parametrize("by", SELECTIONS)
@pytest.mark.parametrize("per_segment", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_other_selections_are_top_k(by: str, per_segment: bool, ties: bool) -> None:
    """Mean and residuals have the same bits, step by step."""
    layout, rng = Layout({"a": (40, 50), "b": 300, "c": 7}), np.random.default_rng(0)
    options: dict[str, Any] = {"density": 0.02, "per_segment": per_segment}
    ours = mpitopk.Simulation(3, layout, TopK(**options))
    other = mpitopk.Simulation(3, layout, TopKBy(**options, by=by))
    for _ in range(6):
        shape = 3, layout.size
        draw = rng.integers(-4, 5, shape) if ties else rng.standard_normal(shape)
        gradients = draw.astype(np.float32)
        np.testing.assert_array_equal(ours.allreduce(gradients), other.allreduce(gradients))
    for mine, theirs in zip(ours.residuals, other.residuals, strict=True):
        np.testing.assert_array_equal(mine["residual"], theirs["residual"])
