"""A step allocates nothing of the gradient's size once it is warm."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpitopk import (
    ALQ,
    DGC,
    LAGS,
    QSGD,
    AdaComp,
    Dense,
    Filter,
    GaussianK,
    Grassmann,
    GTopK,
    Layout,
    RandomK,
    Runtime,
    ScaleCom,
    TopK,
)
from mpitopk.device import WHY_NOT_COMPILED

SIZE = 1_000_000


@pytest.mark.skipif(bool(WHY_NOT_COMPILED), reason="plain NumPy needs temporaries")
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("scheme", "sparse"),
    [
        (TopK(0.01), False),
        (TopK(0.01), True),
        (TopK(0.01, values="float16"), False),
        (TopK(0.01, values=QSGD()), False),
        (GaussianK(0.01), False),
        (Filter(0.01), False),
        (DGC(0.01, selector="sampled"), False),
        (DGC(0.01), False),
        (ScaleCom(0.01), False),
        (ScaleCom(chunk=100), False),
        (GTopK(0.01), False),
        (LAGS({"w": 0.0}), False),
        (AdaComp(), False),
        (QSGD(), False),
        (QSGD(coding="elias"), False),
        (ALQ(), False),
        (Grassmann(), False),
        (RandomK(0.01), False),
        (RandomK(0.01), True),
        (Dense(), False),
        (Dense(), True),
        (TopK(lambda step: 0.01 if step % 2 else 0.005), False),
    ],
)
def test_warm_steps_allocate_nothing_large(scheme: Any, dtype: str, sparse: bool) -> None:
    layout = Layout({"w": SIZE}, dtype=dtype)
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(SIZE).astype(dtype) for _ in range(3)]
    with Runtime(MPI.COMM_SELF, layout, scheme, device="host") as runtime:
        for gradient in gradients * 4:
            runtime.allreduce(gradient, sparse)
        tracemalloc.start()
        for gradient in gradients * 2:
            runtime.allreduce(gradient, sparse)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 50_000, "bytes; the gradient has millions"
