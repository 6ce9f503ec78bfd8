"""The house: style, types, packaging, and documents that are true."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "mpitopk").rglob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
]


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lint() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")


def test_format() -> None:
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_types() -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", "/dev/null")


def test_every_file_is_installed() -> None:
    listed = set()
    for build in (ROOT / "mpitopk").rglob("meson.build"):
        for name in re.findall(r"'([^']+\.(?:py|pyi|typed|cu|cuh))'", build.read_text()):
            listed.add((build.parent / name).relative_to(ROOT))
    there = {
        path.relative_to(ROOT)
        for path in (ROOT / "mpitopk").rglob("*")
        if path.suffix in {".py", ".pyi", ".typed", ".cu", ".cuh"} or path.name == "py.typed"
    }
    assert listed == there


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__main__")])
def test_docstring_examples(module: str) -> None:
    if module == "mpitopk.device.host":
        pytest.importorskip("mpitopk.device._native")
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_readme_examples() -> None:
    """Every Python block of the README runs, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    run(sys.executable, "-W", "error", "-c", "\n".join(blocks), cwd=ROOT / "tests")


def test_readme_names_what_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\b(?:examples|tests|profiling|mpitopk)/[\w/.-]*\w", text):
        assert (ROOT / path).exists(), path


def test_only_the_transport_imports_mpi() -> None:
    """Commands of their own may (`info`, `bench`); everything else leaves MPI alone."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for_types = [
            n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        ]
        exempt = {id(node) for block in for_types for node in ast.walk(block)}
        imports = [
            n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in exempt
        ]
        if any("mpi4py" in ast.unparse(node) for node in imports):
            assert path.name in {"transport.py", "info.py", "cuda_aware.py"} or path.parent.name == "bench", (
                path
            )


def test_versions_agree() -> None:
    versions = {
        re.search(r"^version = \"(.+)\"", (ROOT / "pyproject.toml").read_text(), re.M).group(1),  # type: ignore[union-attr]
        re.search(r"version: '(.+)'", (ROOT / "meson.build").read_text()).group(1),  # type: ignore[union-attr]
        importlib.import_module("mpitopk").__version__,
    }
    assert len(versions) == 1


def test_modules_are_short() -> None:
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 300, path


def test_importing_the_package_does_not_initialise_mpi() -> None:
    code = "import sys, mpitopk; assert 'mpi4py.MPI' not in sys.modules"
    run(sys.executable, "-c", code, cwd=ROOT / "tests")
