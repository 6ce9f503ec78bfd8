"""Ranks to test with: simulated ones, or those of MPI, behind the same few calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from devices import got, handed

import mpitopk

Array = np.ndarray[Any, Any]


class Simulated:
    """Many ranks in this process."""

    def __init__(self, size: int, layout: mpitopk.Layout, scheme: mpitopk.Scheme, **options: Any) -> None:
        self.size = size
        self.device = options.get("device", "auto")
        self.simulation = mpitopk.Simulation(size, layout, scheme, **options)

    def step(self, gradients: Any, sparse: bool = False) -> Any:
        return got(self.simulation.allreduce([handed(self.device, g) for g in gradients], sparse))

    def residuals(self) -> list[Array]:
        none = np.empty(0, np.float32)
        return [got(state.get("residual", none)).copy() for state in self.simulation.residuals]

    def steps(self) -> int:
        return self.simulation.participants[0].rank.step


class Mpi:
    """The ranks of a communicator, of which this process is one."""

    def __init__(self, comm: Any, layout: mpitopk.Layout, scheme: mpitopk.Scheme, **options: Any) -> None:
        self.comm = comm
        self.size = comm.size
        self.device = options.get("device", "auto")
        self.runtime = mpitopk.Runtime(comm, layout, scheme, **options)

    def step(self, gradients: Any, sparse: bool = False) -> Any:
        mean = self.runtime.allreduce(handed(self.device, gradients[self.comm.rank]), sparse)
        self.runtime.check_replicas(list(mean) if sparse else mean)
        return got(mean)

    def residuals(self) -> list[Array]:
        mine = [v.reshape(-1) for k, v in self.runtime.state_dict().items() if k.startswith("residual/")]
        every: list[Array] = self.comm.allgather(np.concatenate([*mine, np.empty(0, np.float32)]))
        return every

    def steps(self) -> int:
        return self.runtime.step


LAYOUT = mpitopk.Layout({"w": (12, 10), "b": 7, "none": 0, "v": 60, "s": ()})
SEGMENTS = [(s.start, s.stop) for s in LAYOUT]


def whole(ranks: int, step: int, layout: mpitopk.Layout = LAYOUT, dtype: Any = np.float32) -> Array:
    """Gradients of whole numbers, with many ties."""
    rng = np.random.default_rng((ranks, step))
    return rng.integers(-40, 41, (ranks, layout.size)).astype(dtype)
