"""A quantiser on top of a sparsifier: the bytes promised, nothing lost, and what is wrong said by name."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from worlds import LAYOUT, Simulated, whole

from mpitopk import DGC, QSGD, GaussianK, Layout, Simulation, TopK, make_scheme
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.wire import HEADER

quiet = pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
SCHEMES: dict[str, Any] = {
    "topk": TopK(0.1, values=QSGD()),
    "2 bits": TopK(0.1, values=QSGD(bits=2, bucket=32)),
    "small ones dense": TopK(0.1, dense_below=20, values=QSGD(bits=8, norm="l2")),
    "all dense": TopK(0.1, dense_below=1000, values=QSGD(bits=3)),
    "schedule": TopK(lambda step: 0.3 / (step + 1), values=QSGD(bits=4)),
    "thresholded": GaussianK(0.1, values=QSGD(bits=4)),
    "unmasked": DGC(0.1, momentum=0.0, values=QSGD(bits=6)),
}
each = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@quiet
@each
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_what_rounding_loses_is_kept(scheme: Any, ranks: int, device: str) -> None:
    world = Simulated(ranks, LAYOUT, scheme, device=device)
    given = np.zeros(LAYOUT.size)
    for step in range(5):
        gradients = whole(ranks, step)
        given += gradients.sum(axis=0) - ranks * world.step(gradients).astype(np.float64)
        kept = np.sum(world.residuals(), axis=0, dtype=np.float64)
        np.testing.assert_allclose(kept, given, rtol=1e-5, atol=1e-3 * ranks)
    assert np.abs(given).max() > 1


@quiet
@each
def test_a_sparse_mean_has_the_entries_of_the_dense_one(scheme: Any, device: str) -> None:
    bodies.sparse_is_dense(*(Simulated(3, LAYOUT, scheme, device=device) for _ in range(2)))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("bits", "bucket", "n"), [(4, 512, 50_000), (3, 32, 310), (2, 128, 1)])
def test_bytes(size: int, bits: int, bucket: int, n: int) -> None:
    """A header; 4 bytes for each index and each bucket; `bits` words for every 32 values."""
    scheme = TopK(0.1, values=QSGD(bits=bits, bucket=bucket))
    simulation = Simulation(size, Layout({"w": n}), scheme)
    simulation.allreduce(np.random.default_rng(n).standard_normal((size, n), dtype=np.float32))
    k = -(-n // 10)
    words = k + -(-k // bucket) + bits * -(-k // 32)
    assert simulation.bytes == (size - 1) * (HEADER.size + -(-words // 2) * 8)


@quiet
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_selected_is_the_quantiser(dtype: str) -> None:
    """In the first step: later ones have what the first has lost to make good."""
    layout, quantizer = Layout({"w": 3000}, dtype=dtype), QSGD(bits=3, bucket=64, seed=8)
    g = np.random.default_rng(0).standard_normal((4, 3000)).astype(dtype)
    one, other = (Simulation(4, layout, scheme) for scheme in (TopK(1.0, values=quantizer), quantizer))
    assert bodies.same(one.allreduce(g), other.allreduce(g))


def test_feedback_makes_good_what_two_bits_lose(device: str) -> None:
    """Of a gradient that stays as it is, ever less is missing from the sum of the means."""
    g = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
    world = Simulated(1, Layout({"w": 256}), TopK(0.25, values=QSGD(bits=2, bucket=32)), device=device)
    total, far = np.zeros(256), {}
    for step in range(1, 401):
        total += world.step(g)
        far[step] = float(np.linalg.norm(total / step - g))
    assert far[400] < far[100] / 2 < far[25] / 4


def test_options_by_name_and_wrong_ones() -> None:
    scheme = make_scheme("topk", density=0.1, values="qsgd")
    assert scheme == TopK(0.1, values=QSGD())
    assert "values=QSGD(bits=4" in scheme.describe()
    with pytest.raises(ConfigError, match="values is 'qsdg': did you mean 'qsgd'"):
        TopK(0.1, values="qsdg")
    with pytest.raises(ConfigError, match="values has coding='elias': give 'fixed'"):
        TopK(0.1, values=QSGD(coding="elias"))


@quiet
def test_a_message_of_no_possible_size_is_refused() -> None:
    simulation = Simulation(2, LAYOUT, GaussianK(0.1, values=QSGD()))
    simulation.allreduce(whole(2, 0))
    rounding = simulation.participants[0].state.rounding  # type: ignore[attr-defined]
    messages = rounding.message.alone
    messages.words[0][2] = 1  # an index without a value
    with pytest.raises(ExchangeError, match="rank 0 has 1 words, which no number of entries takes"):
        rounding.decode(messages)
