"""Launch one of the kernels of faults.cu: python faults.py LANE KERNEL [MACRO ...].

Exits with 0 if the result is right, 2 if the launch was refused or ended, 3 if the result is wrong; the
sanitizers end the process in their own way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import cudasim

REFUSED, WRONG = 2, 3
SOURCE = Path(__file__).parent / "faults.cu"

Launch = Callable[..., None]


def out_of_bounds(launch: Launch) -> bool:
    x = np.zeros(1020, np.float32)
    launch(4, 256, [x])
    return bool((x == 1).all())


def shared_out_of_bounds(launch: Launch) -> bool:
    launch(1, 64, [np.zeros(1024, np.int32), np.int32(1)])
    return True


def dynamic_out_of_bounds(launch: Launch) -> bool:
    launch(1, 64, [np.zeros(1024, np.int32), np.int32(1)], shared=4 * 64)
    return True


def reversed_(launch: Launch) -> bool:
    out = np.zeros(64, np.int32)
    launch(1, 64, [out])
    return bool((out == np.arange(64)[::-1]).all())


def swapped(launch: Launch) -> bool:
    out = np.zeros(32, np.int32)
    launch(1, 32, [out])
    return bool((out == np.arange(32) ^ 1).all())


def counted(launch: Launch) -> bool:
    count = np.zeros(1, np.uint32)
    launch(4, 1, [count])
    return bool(count[0] == 4)


def summed(launch: Launch) -> bool:
    x, parts, total = np.arange(4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(1, np.float32)
    launch(4, 32, [x, parts, total, np.zeros(1, np.uint32)])
    return bool(total[0] == x.sum())


def never_cleared(launch: Launch) -> bool:
    out = np.zeros(32, np.uint32)
    launch(1, 32, [out])
    return bool((out == 1).all())


def divergent_barrier(launch: Launch) -> bool:
    launch(1, 64, [np.zeros(64, np.int32)])
    return True


def lanes_that_never_come(launch: Launch) -> bool:
    launch(1, 32, [np.zeros(32, np.uint32)])
    return True


def misaligned(launch: Launch) -> bool:
    launch(1, 1, [np.zeros(1024, np.float32), np.zeros(1024, np.float32)])
    return True


CASES = {
    case.__name__.rstrip("_"): case
    for case in (
        out_of_bounds, shared_out_of_bounds, dynamic_out_of_bounds, reversed_, swapped, counted, summed,
        never_cleared, divergent_barrier, lanes_that_never_come, misaligned,
    )
}  # fmt: skip


def main(lane: str, kernel: str, *macros: str) -> int:
    module = cudasim.Module(SOURCE.read_text(), list(CASES), lane, defines=macros, path=SOURCE.name)
    module.configure(order="shuffled", yields=200)
    try:
        right = CASES[kernel](lambda *launch, **options: module.launch(kernel, *launch, **options))
    except cudasim.LaunchError as error:
        print(error)
        return REFUSED
    return 0 if right else WRONG


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
