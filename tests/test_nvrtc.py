"""The kernels through NVIDIA's compiler, which needs no GPU: do they compile, and what do they use?"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

MISSING = [name for name in ("cupy", "nvidia") if importlib.util.find_spec(name) is None]
COMPILE = """
import sys
from cupy_backends.cuda.libs import nvrtc
from mpitopk.device import launch

program = nvrtc.createProgram(launch.source(), "kernels.cu", (), ())
for name in launch.NAMES:
    nvrtc.addNameExpression(program, name)
options = "--std=c++17", f"--gpu-architecture={sys.argv[1]}", "--ptxas-options=-v"
try:
    nvrtc.compileProgram(program, options)
finally:
    print(nvrtc.getProgramLog(program))
"""


def used(log: str) -> dict[str, dict[str, int]]:
    """Return the numbers before "registers", "bytes spill stores" and "bytes smem" of each kernel."""
    kernels: dict[str, dict[str, int]] = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            numbers = kernels.setdefault(entry[1], {})
        for number, what in re.findall(r"(\d+) (registers|bytes spill stores|bytes smem)", line):
            numbers[what] = int(number)
    return kernels


@pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: pip install --group gpu")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles_within_its_budget(architecture: str) -> None:
    """Four blocks of 256 threads on a multiprocessor, or one of 1024: 64 registers a thread."""
    command = [sys.executable, "-c", COMPILE, architecture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = used(done.stdout)
    assert len(kernels) > 30
    for name, numbers in kernels.items():
        assert numbers["registers"] <= 64, name
        assert numbers["bytes spill stores"] <= 8, name
        assert numbers.get("bytes smem", 0) <= 32 * 1024, name
