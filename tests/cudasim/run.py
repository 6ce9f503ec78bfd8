"""Run a script with the stand-in as CuPy: python tests/cudasim/run.py SCRIPT ARGUMENTS...

CUDASIM_LANE, CUDASIM_POLICY and CUDASIM_DEVICES are what the stand-in is installed with.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cudasim import standin


def main() -> None:
    del sys.argv[0]
    sys.path[:2] = [str(Path(sys.argv[0]).resolve().parent)]
    standin.install(
        lane=os.environ.get("CUDASIM_LANE", "fast"),
        policy=os.environ.get("CUDASIM_POLICY", "lazy"),
        devices=int(os.environ.get("CUDASIM_DEVICES", "1")),
    )
    runpy.run_path(sys.argv[0], run_name="__main__")
    standin.check_late()


if __name__ == "__main__":
    main()
