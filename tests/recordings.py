"""Recordings to report on: made by hand, and of real ranks of which one is slow."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_examples import MPIEXEC

HEADERS = [header for path in sys.path for header in Path(path).glob("nvidia/*/include/nvtx3/nvToolsExt.h")]
NVTX_TOOL = Path(__file__).parent / "nvtx" / "record.c"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
SLOW = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import mpitopk

comm = MPI.COMM_WORLD
mpitopk.abort_on_error()
os.environ["NVTX_RECORD"] = f"nvtx{comm.rank}"
layout = mpitopk.Layout({"w": (100, 20), "b": 20})
scheme = mpitopk.make_scheme(sys.argv[1], **({"density": 0.1} if sys.argv[1] == "topk" else {}))
with mpitopk.Runtime(comm, layout, scheme) as runtime:
    for step in range(int(sys.argv[2])):
        with runtime.range("forward"):
            if comm.rank == 1:
                time.sleep(0.03)
        runtime.gradient[:] = np.random.default_rng((step, comm.rank)).standard_normal(layout.size)
        with runtime.range("update"):
            runtime.allreduce(runtime.gradient)
"""


class Call(NamedTuple):
    """What a profiler is told; `payload` and `text` of a push only."""

    push: bool
    domain: str
    time: int
    category: str = ""
    text: str = ""
    payload: int | None = None
    registered: bool = False


@functools.cache
def nvtx_tool() -> Path:
    """Build the library that records what a profiler would see."""
    assert HEADERS, "pip install nvidia-nvtx (of the dependency group test)"
    library = Path(tempfile.mkdtemp(prefix="mpitopk-nvtx-")) / "record.so"
    include = f"-I{HEADERS[-1].parents[1]}"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", include]
    subprocess.run([*command, str(NVTX_TOOL), "-o", str(library)], check=True)
    return library


def calls(path: Path) -> list[Call]:
    """Return what the library has recorded."""
    found, categories = [], {}
    for line in path.read_text().splitlines():
        kind, domain, *rest = line.split("\t")
        if kind == "category":
            categories[domain, rest[0]] = rest[1]
        elif kind == "push":
            number, text, payload, how, time = rest
            category = categories.get((domain, number), "")
            step = int(payload) if payload else None
            found.append(Call(True, domain, int(time), category, text, step, how == "registered"))
        else:
            found.append(Call(False, domain, int(rest[0])))
    return found


def slow_rank(folder: Path, scheme: str, steps: int = 20, ranks: int = 3) -> tuple[Path, list[list[Call]]]:
    """Run ranks of which number 1 takes 30 ms longer; return the timeline, and what NVTX has seen."""
    done = subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, "-c", SLOW, scheme, str(steps)],
        cwd=folder,
        env={**os.environ, "MPITOPK_TIMELINE": "run.json", "NVTX_INJECTION64_PATH": str(nvtx_tool())},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run.json", [calls(folder / f"nvtx{rank}") for rank in range(ranks)]


def export(
    path: Path,
    ranges: list[tuple[str, int, int, int]],
    *,
    domain: str = "mpitopk",
    pid: int = 77,
    inline: bool = False,
    **more: list[tuple[Any, ...]],
) -> Path:
    """Write, or add to, an SQLite file as Nsight Systems does; ranges are (text, start, stop, step)."""
    thread, number = pid << 24 | 5, 3
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.execute(
            "CREATE TABLE IF NOT EXISTS NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, "
            "category INTEGER, text TEXT, textId INTEGER, domainId INTEGER, globalTid INTEGER, "
            "int64Value INTEGER)"
        )
        insert = "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, NULL, ?, ?, ?, ?, ?)"
        db.execute(insert, (0, None, 75, domain, None, number, thread, None))
        db.execute(insert, (0, None, 75, "of another library", None, number + 1, thread, None))
        db.execute(insert, (10, 20, 59, "exchange", None, number + 1, thread, None))
        for text, start, stop, step in ranges:
            db.execute("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", (hash(text) % 10**6, text))
            name = (text, None) if inline else (None, hash(text) % 10**6)
            db.execute(insert, (start, stop, 59, *name, number, thread, step))
        for table, rows in more.items():
            columns, *values = rows
            db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})")
            holes = ", ".join("?" * len(columns))
            db.executemany(f"INSERT INTO {table} VALUES ({holes})", values)
    return path


def export_of(path: Path, seen: list[Call]) -> Path:
    """Write what NVTX has seen as Nsight Systems would."""
    ranges, began = [], []
    for call in seen:
        if call.push:
            began.append(call)
        else:
            push = began.pop()
            assert push.payload is not None
            ranges.append((push.text, push.time, call.time, push.payload))
    return export(path, ranges)


def timeline(path: Path, spans: dict[int, list[tuple[str, float, float, int]]], **about: Any) -> Path:
    """Write a timeline as the runtime does; ranges are (name, start in ms, stop in ms, step)."""
    records: list[dict[str, Any]] = []
    for rank, ranges in spans.items():
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for name, start, stop, step in ranges:
            at = {"ts": 1e3 * start, "dur": 1e3 * (stop - start), "args": {"step": step}}
            records.append({"ph": "X", "name": name, "pid": rank, "tid": 0, **at})
    path.write_text(json.dumps({"traceEvents": records, "otherData": about}))
    return path
