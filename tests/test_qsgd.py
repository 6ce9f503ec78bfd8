"""Entries rounded at random: without bias, within the bounds of the variance, in the bytes promised."""

from __future__ import annotations

import math
import warnings
from typing import Any

import bodies
import numpy as np
import pytest
from devices import computes
from worlds import LAYOUT, Array, Mpi, Simulated, whole

from mpitopk import QSGD, Dense, Layout, Simulation, make_scheme
from mpitopk.errors import ConfigError
from mpitopk.metrics import Metrics
from mpitopk.wire import HEADER

D = 512


def normal(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def draws(scheme: Any, g: Array, count: int, ranks: int = 1) -> Array:
    """Means of the same gradients, one for each step: float64[count, n]."""
    simulation = Simulation(ranks, Layout({"w": g.size}), scheme)
    return np.array([simulation.allreduce([g] * ranks).astype(np.float64) for _ in range(count)])


def without_bias(scheme: Any, ranks: int = 1) -> float:
    """Return the r.m.s. of the mean error in standard errors."""
    g, count = normal(D), 400
    found = draws(scheme, g, count, ranks)
    error, deviation = found.mean(axis=0) - g, found.std(axis=0, ddof=1)
    # Entries that hardly ever take the other level have no standard error to speak of.
    fair = (np.abs(found - np.median(found, axis=0)) > 0.01).sum(axis=0) > 20
    assert fair.sum() > D / 3
    return float(np.sqrt(np.mean((error[fair] / deviation[fair]) ** 2 * count)))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unbiased(bits: int, norm: str) -> None:
    assert 0.8 < without_bias(QSGD(bits=bits, norm=norm, bucket=128)) < 1.2


@pytest.mark.parametrize(("s", "bits"), [(1, 2), (7, 4), (15, 5)])
def test_variance_and_zeros_of_the_2_norm(s: int, bits: int) -> None:
    """Alistarh et al., lemma 3.1: at most min(d / s**2, sqrt(d) / s) |v|**2, and s (s + sqrt(d)) entries."""
    g = normal(D)
    found = draws(QSGD(bits=bits, norm="l2"), g, 200)
    square = float(np.sum(g.astype(np.float64) ** 2))
    variance = np.mean(np.sum((found - g) ** 2, axis=1)) / square
    bound = min(D / s**2, math.sqrt(D) / s)
    assert 0.1 * bound < variance <= bound
    assert np.mean(np.count_nonzero(found, axis=1)) <= s * (s + math.sqrt(D))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_variance_of_the_largest_magnitude(bits: int) -> None:
    g, s = normal(D), 2 ** (bits - 1) - 1
    variance = np.mean(np.sum((draws(QSGD(bits=bits), g, 100) - g) ** 2, axis=1))
    assert variance <= D * float(np.abs(g).max()) ** 2 / (4 * s * s)


def test_ranks_divide_the_variance() -> None:
    g = normal(D)
    one, eight = (np.mean((draws(QSGD(), g, 100, ranks) - g) ** 2) for ranks in (1, 8))
    assert 0.9 < 8 * eight / one < 1.1


def test_numbers_depend_on_seed_step_and_rank() -> None:
    g = np.repeat(normal(LAYOUT.size)[None], 3, axis=0)
    first, again, other = (Simulation(3, LAYOUT, QSGD(seed=seed)) for seed in (1, 1, 2))
    means = [[run.allreduce(g).copy() for _ in range(3)] for run in (first, again, other)]
    assert all(map(bodies.same, means[0], means[1]))
    different = [*means[0], *means[2]]
    assert len({mean.tobytes() for mean in different}) == len(different)
    codes = {p.state.codes.tobytes() for p in first.participants}  # type: ignore[attr-defined]
    assert len(codes) == 3


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(("bits", "bucket", "n"), [(4, 512, 5000), (3, 32, 31), (2, 128, 128), (8, 512, 1)])
def test_bytes(size: int, bits: int, bucket: int, n: int) -> None:
    """A header, 4 bytes for each bucket, and `bits` words for every 32 entries; padded to 8 bytes."""
    simulation = Simulation(size, Layout({"w": n}), QSGD(bits=bits, bucket=bucket))
    simulation.allreduce(np.ones((size, n), np.float32))
    words = -(-n // bucket) + bits * -(-n // 32)
    assert simulation.bytes == (size - 1) * (HEADER.size + -(-words // 2) * 8)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_many_levels_are_nearly_dense(ranks: int, device: str) -> None:
    g = whole(ranks, 0)
    mean = Simulated(ranks, LAYOUT, QSGD(bits=8, bucket=32), device=device).step(g)
    np.testing.assert_allclose(mean, Simulation(ranks, LAYOUT, Dense()).allreduce(g), atol=40 / 127)


def test_ranks_have_scales_of_their_own() -> None:
    """One with large entries costs the others nothing: entries of one magnitude stay what they are."""
    g = np.ones((2, 512), np.float32)
    g[0, ::3] = -1
    g[1] = 1e28
    np.testing.assert_array_equal(
        Simulation(2, Layout({"w": 512}), QSGD(bits=2)).allreduce(g), (g[0] + g[1]) / 2
    )


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_zeros_first_and_in_between(norm: str, device: str) -> None:
    world = Simulated(3, LAYOUT, QSGD(bits=2, bucket=32, norm=norm), device=device)
    zero = np.zeros((3, LAYOUT.size), np.float32)
    for g in (zero, whole(3, 1), zero, -zero):
        mean = world.step(g)
        assert np.isfinite(mean).all()
        assert g.any() or not mean.any()
    half = whole(3, 2)
    half[:, 64:] = 0
    assert not world.step(half)[64:].any(), "entries that are always 0 receive no noise"


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_tiny_buffers(n: int, ranks: int, device: str) -> None:
    world = Simulated(ranks, Layout({"w": n}), QSGD(), device=device)
    np.testing.assert_allclose(world.step(np.full((ranks, n), 2.5, np.float32)), np.full(n, 2.5), rtol=1e-6)
    indices, values = world.step(np.full((ranks, n), 2.5, np.float32), sparse=True)
    assert indices.tolist() == list(range(n))
    assert values.size == n


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_types(dtype: str, device: str) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    layout, x = Layout({"w": 300}, dtype=dtype), np.tile(np.array([1, -1, 0], np.float32), 100)
    scale = 1e290 if dtype == "float64" else 1
    g = (
        (x.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bfloat16"
        else x.astype(layout.storage) * scale
    )
    mean = Simulated(2, layout, QSGD(bits=2), device=device).step([g, g])
    assert mean.dtype == layout.accumulator
    np.testing.assert_array_equal(mean, x.astype(layout.accumulator) * scale)


def test_a_sparse_mean_is_the_dense_one(device: str) -> None:
    bodies.sparse_is_dense(*[Simulated(3, LAYOUT, QSGD(), device=device) for _ in range(2)])


@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_a_failed_step_leaves_no_trace(what: str, device: str) -> None:
    broken = bodies.broken_gradients(3, 2)[what]
    bodies.fails_without_trace(Simulated(3, LAYOUT, QSGD(), device=device), *broken)


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_ranks_fail_together(comm: Any, what: str, device: str) -> None:
    broken = bodies.broken_gradients(comm.size, comm.size - 1)[what]
    bodies.fails_without_trace(Mpi(comm, LAYOUT, QSGD(), device=device), *broken)


@pytest.mark.parametrize(("bits", "warned"), [(8, True), (2, False)])
def test_more_bytes_than_dense_are_announced(bits: int, warned: bool) -> None:
    """On 16 ranks: 8 bits by allgather move 15 n bytes, a dense allreduce 7.5 n."""
    scheme, layout = QSGD(bits=bits), Layout({"w": 5000})
    simulation = Simulation(16, layout, scheme)
    simulation.allreduce(np.ones((16, 5000), np.float32))
    metrics, rank = Metrics(bytes=simulation.bytes), simulation.participants[0].rank
    metrics.count(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics.warn_if_dear(scheme, rank)
    assert [str(w.message).endswith("give fewer bits, or use Dense()") for w in caught] == [True] * warned


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bits": 1}, "bits is 1: give a whole number from 2 to 8"),
        ({"bits": 9}, "bits is 9"),
        ({"bits": 4.0}, r"bits is 4\.0"),
        ({"bits": True}, "bits is True"),
        ({"bucket": 0}, "bucket is 0: give a multiple of 32 up to 65536"),
        ({"bucket": 100}, "bucket is 100"),
        ({"bucket": 65536 + 32}, "bucket is 65568"),
        ({"norm": "L2"}, "norm is 'L2': .*l2"),
        ({"norm": 2}, "norm is 2"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is"),
        ({"levels": 3}, "QSGD has no option 'levels'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_scheme("qsgd", **options)
