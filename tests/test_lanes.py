"""The CUDA kernels under sanitizers: the same tests, in processes of their own.

The lane `asan` has all that `check` has.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import cudasim
import pytest

HERE = Path(__file__).parent
ALL = [
    "test_cuda.py",
    "test_device.py",
    "test_thresholds.py",
    "test_scalecom.py::test_chunks_of_many_entries_are_as_the_reference_says",
]
FEW_THREADS = [
    "test_cuda.py::test_exact_for_any_data[60-normal]",
    "test_cuda.py::test_exact_for_any_data[600-few distinct]",
    "test_cuda.py::test_a_sample_that_misleads_leads_to_a_full_selection",
    "test_cuda.py::test_random_indices_are_those_of_the_reference[8192]",
    "test_cuda.py::test_merging_over_many_stretches[3-700-float32]",
    "test_device.py::test_messages_are_added_in_rank_order_from_zero[cuda]",
    "test_device.py::test_merging_counts_entries_once_and_keeps_zeros[cuda]",
    "test_device.py::test_nonfinite_entries_are_found[cuda-50-nan-float16]",
    "test_device.py::test_take[cuda-float32-True]",
    "test_device.py::test_two_messages_make_one[cuda-1-lengths0-0.3-float32]",
    "test_device.py::test_values_are_put_back_among_winners_or_elsewhere[cuda-float32]",
    "test_thresholds.py::test_a_few_tiles[cuda]",
]
"""ThreadSanitizer takes about a third of a millisecond for each CUDA thread."""


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)
@pytest.mark.parametrize(("lane", "tests"), [("asan", ALL), ("tsan", FEW_THREADS)])
def test_kernels_are_clean(lane: str, tests: list[str]) -> None:
    environment = cudasim.preload(lane)
    environment |= {"CUDASIM_LANE": lane, "MPITOPK_TEST_DEVICES": "cuda", "MPITOPK_TEST_GPU": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
