"""Blocks as multiples of the nearest line: the operations, and what the scheme promises."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import pytest
from devices import computes, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_adacomp import gathered
from worlds import LAYOUT, Simulated, whole

from mpitopk import Grassmann, Layout, Simulation
from mpitopk.codebook import Codebook, codebook
from mpitopk.device.reference import ReferenceDevice
from mpitopk.device.reference_lines import searched
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.lines import Lines
from mpitopk.typing import Array
from mpitopk.wire import HEADER

REFERENCE = ReferenceDevice()
many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(on: Any, lines: Lines, gradient: Array, residual: Array) -> tuple[Array, Array] | None:
    """Return the words of the code, and what stays."""
    out, words = np.full_like(residual, np.nan), np.full(lines.words, 2**32 - 1, np.uint32)
    return (words, out) if on.encode_lines(gradient, residual, out, lines, words) else None


def same_everywhere(on: Any, layout: Layout, scheme: Grassmann, ranks: int, seed: int) -> None:
    """Code, residual and mean of a device are those of the reference, to the bit."""
    rng, lines = np.random.default_rng(seed), Lines.of(layout, scheme.book, scheme.hinge_bits)
    codes = []
    for _ in range(ranks):
        g, r = rng.standard_normal((2, layout.size)).astype(np.float32)
        r[: layout.size // 3], g[: layout.size // 3] = 0, 0
        truncated = (g.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        g = truncated if layout.dtype == "bfloat16" else g.astype(layout.storage)
        r = r.astype(layout.accumulator)
        mine, right = encoded(on, lines, g, r), encoded(REFERENCE, lines, g, r)
        assert mine is not None
        assert right is not None
        for found, expected in zip(mine, right, strict=True):
            assert found.tobytes() == expected.tobytes()
        codes.append(right[0])
    out, expected = (np.full(layout.size, np.nan, layout.accumulator) for _ in range(2))
    on.merge_lines(gathered(*codes), lines, ranks, out)
    REFERENCE.merge_lines(gathered(*codes), lines, ranks, expected)
    assert out.tobytes() == expected.tobytes()


@many
@given(
    n=st.integers(0, 300),
    block=st.sampled_from([1, 2, 7, 8, 64]),
    bits=st.sampled_from([0, 1, 2, 5, 6, 9]),
    hinge_bits=st.sampled_from([8, 16]),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_all_devices_do_the_same(
    device: str, n: int, block: int, bits: int, hinge_bits: int, dtype: str, ranks: int, seed: int
) -> None:
    if computes(device, dtype):
        scheme = Grassmann(block, bits, hinge_bits, seed)
        same_everywhere(opened(device, 2), Layout({"w": n}, dtype=dtype), scheme, ranks, seed)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_groups_among_threads(device: str, threads: int) -> None:
    """Several scales, of which the last has few blocks and the last block few entries."""
    same_everywhere(opened(device, threads), Layout({"w": 10_003}), Grassmann(4, 5), 2, 0)


def test_equal_products_take_the_first(device: str) -> None:
    """Twice the same vector, once turned round, and so each representative: the second is never taken."""
    book = codebook(4, 5, 0)
    representatives, vectors = (np.repeat(x, 2, axis=0) for x in (book.representatives, book.vectors))
    for x in (representatives, vectors):
        x[1::2] *= -1
    lines = Lines(400, Codebook(representatives, vectors), 8, "float32")
    assert lines.book.members == 8
    x = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    code = encoded(opened(device, 1), lines, x, 0 * x)
    assert code is not None
    planes = lines.parts(code[0])[1].reshape(lines.chunks, lines.bits)
    assert not planes[:, 0].any(), "of vectors, the even ones"
    assert not planes[:, 3].any(), "and of branches"
    assert planes[:, [1, 2]].any()
    assert planes[:, 4:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 99])
def test_what_is_not_finite_is_found(device: str, bad: float, where: int) -> None:
    lines, g = Lines.of(Layout({"w": 100}), codebook(8, 4, 0), 8), np.ones(100, np.float32)
    g[where] = bad
    assert encoded(opened(device, 1), lines, g, np.zeros(100, np.float32)) is None


def test_a_product_may_be_larger_than_its_entries(device: str) -> None:
    """Which are below the limit, so that it is finite."""
    lines = Lines.of(Layout({"w": 16}), codebook(8, 4, 0), 8)
    g = np.append(np.zeros(8), 7e28 * np.sign(lines.book.vectors[3])).astype(np.float32)
    assert encoded(opened(device, 1), lines, 2 * g, np.zeros(16, np.float32)) is None
    assert encoded(opened(device, 1), lines, g, np.zeros(16, np.float32)) is not None


@pytest.mark.parametrize("scheme", [Grassmann(), Grassmann(4, 8, 16), Grassmann(3, 4, 8, 7)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_nothing_is_lost(scheme: Grassmann, size: int, device: str) -> None:
    world = Simulated(size, LAYOUT, scheme, device=device)
    old = np.zeros(LAYOUT.size)
    for step in range(4):
        g = whole(size, step)
        mean = world.step(g).astype(np.float64)
        new = np.sum(world.residuals(), axis=0, dtype=np.float64)
        np.testing.assert_allclose(size * mean + new, g.sum(axis=0) + old, rtol=1e-5, atol=1e-3)
        old = new


def test_what_one_step_leaves(device: str) -> None:
    """|x - h c|^2 = |x|^2 - h^2 for each block, but for the rounding of h."""
    world = Simulated(1, Layout({"w": 4096}), Grassmann(block=8, hinge_bits=16), device=device)
    x = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32)
    sent = world.step(x).astype(np.float64).reshape(-1, 8)
    left = world.residuals()[0].astype(np.float64).reshape(-1, 8)
    size = (x.astype(np.float64).reshape(-1, 8) ** 2).sum(axis=1)
    np.testing.assert_allclose((left**2).sum(axis=1), size - (sent**2).sum(axis=1), atol=2e-3)


@pytest.mark.parametrize(
    ("block", "bits", "error"), [(4, 8, 0.030), (8, 12, 0.125), (8, 8, 0.257), (8, 3, 0.625)]
)
def test_how_much_of_noise_is_left(block: int, bits: int, error: float) -> None:
    """Relative squared error on N(0, 1), within a few standard errors."""
    simulation = Simulation(1, Layout({"w": 8192}), Grassmann(block, bits))
    x = np.random.default_rng(0).standard_normal((1, 8192)).astype(np.float32)
    simulation.allreduce(x)
    left = float((simulation.residuals[0]["residual"] ** 2).sum() / (x**2).sum())
    assert left == pytest.approx(error, rel=0.05)


def test_training_pays() -> None:
    """The tree is hardly worse than a search of as many random directions; random trees are much worse."""
    rng = np.random.default_rng(0)
    x, drawn = rng.standard_normal((4000, 8)), rng.standard_normal((264, 8))
    drawn /= np.sqrt((drawn**2).sum(axis=1, keepdims=True))

    def lost(rows: Array, products: Array) -> float:
        return float(1 - (products**2).sum() / (rows**2).sum())

    def of_tree(book: Codebook) -> float:
        return lost(x, searched(x, book)[1])

    random = drawn[8:].astype(np.float32)
    home = np.argsort(np.abs(random @ drawn[:8].T).argmax(axis=1), kind="stable")
    exhaustive = lost(x, np.abs(x @ random.T).max(axis=1))
    assert of_tree(codebook(8, 8, 0)) < 1.05 * exhaustive
    assert of_tree(Codebook(drawn[:8].astype(np.float32), random[home])) > 1.2 * exhaustive


@pytest.mark.parametrize(
    ("block", "bits"), [(1, 4), (2, 8), (3, 2), (4, 11), (7, 1), (8, 8), (16, 9), (64, 3), (64, 7)]
)
def test_a_search_finds_each_vector(block: int, bits: int) -> None:
    """Or one that is as near to rounding, in its branch; of one entry there is but one line."""
    book = codebook(block, bits, 1)
    numbers, products = searched(book.vectors, book)
    np.testing.assert_allclose(np.abs(products), 1, rtol=1e-6)
    home = np.arange(2**bits) // book.members
    assert (numbers // book.members == (home if block > 1 else 0)).all()


@pytest.mark.parametrize(
    ("bits", "branches", "members"), [(0, 1, 1), (1, 1, 2), (2, 2, 2), (3, 2, 4), (8, 16, 16)]
)
def test_how_many_branches(bits: int, branches: int, members: int) -> None:
    book = codebook(5, bits, 0)
    assert book.representatives.shape == (branches, 5)
    assert (book.vectors.shape, book.members) == ((2**bits, 5), members)


def test_multiples_of_a_vector_are_exact_up_to_the_coefficient(device: str) -> None:
    scheme = Grassmann(hinge_bits=16)
    factors = np.array([-3, 1, 0.5, 2, -1], np.float32)
    x = (factors[:, None] * scheme.book.vectors[[5, 200, 17, 0, 255]]).reshape(1, -1)
    world = Simulated(1, Layout({"w": 40}), scheme, device=device)
    np.testing.assert_allclose(world.step(x), x[0], atol=3 / 32767)


def test_one_block_is_vector_quantisation(device: str) -> None:
    """Of a tree: the coefficient is the largest one, hence not rounded but in the last bits."""
    scheme, x = Grassmann(), np.arange(1, 9, dtype=np.float32)
    branch = np.argmax(np.abs(scheme.book.representatives.astype(np.float64) @ x))
    members = scheme.book.vectors.reshape(16, 16, 8)[branch].astype(np.float64)
    best = np.argmax(np.abs(members @ x))
    mean = Simulated(1, Layout({"w": 8}), scheme, device=device).step(x[None])
    np.testing.assert_allclose(mean, (members[best] @ x) * members[best], rtol=1e-5)


def test_a_power_of_two_changes_the_exponent_alone(device: str) -> None:
    g = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    one, other = (Simulated(3, Layout({"w": 200}), Grassmann(), device=device) for _ in range(2))
    for _ in range(3):
        np.testing.assert_array_equal(one.step(g) * 1024, other.step(g * 1024))


@pytest.mark.parametrize(("block", "bits", "hinge_bits"), [(8, 8, 8), (4, 12, 16), (3, 5, 8), (1, 0, 8)])
def test_what_a_message_holds(block: int, bits: int, hinge_bits: int) -> None:
    """Bit planes of 32 blocks, a coefficient for each block, a scale for 1024, and not a byte more."""
    layout = Layout({"w": 9001})
    simulation = Simulation(3, layout, Grassmann(block, bits, hinge_bits))
    simulation.allreduce(whole(3, 0, layout))
    blocks = -(-9001 // block)
    code = 4 * -(-blocks // 1024) + 4 * bits * -(-blocks // 32) + 4 * -(-blocks * hinge_bits // 32)
    assert simulation.bytes == 2 * (HEADER.size + -(-code // 8) * 8)


@pytest.mark.parametrize("size", [1, 3])
def test_a_sparse_mean_is_the_dense_one(size: int, device: str) -> None:
    worlds = [Simulated(size, LAYOUT, Grassmann(), device=device) for _ in range(2)]
    for step in range(2):
        mean, sparse = (
            worlds[0].step(whole(size, step)).copy(),
            worlds[1].step(whole(size, step), sparse=True),
        )
        spread = np.zeros_like(mean)
        spread[sparse.indices] = sparse.values
        np.testing.assert_array_equal(spread, mean)


@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_a_failed_step_leaves_no_trace(what: str, device: str) -> None:
    broken = bodies.broken_gradients(3, 2)[what]
    bodies.fails_without_trace(Simulated(3, LAYOUT, Grassmann(), device=device), *broken)


@pytest.mark.parametrize("n", [0, 1, 9])
def test_hardly_any_entries(n: int, device: str) -> None:
    """What pads the last block is never given back."""
    world = Simulated(3, Layout({"w": n}), Grassmann(block=8, bits=0), device=device)
    assert world.step(np.ones((3, n), np.float32)).shape == (n,)


def test_zeros_stay_zero(device: str) -> None:
    world = Simulated(2, LAYOUT, Grassmann(), device=device)
    assert not world.step(np.zeros((2, LAYOUT.size), np.float32)).any()
    assert not np.any(world.residuals())


def test_a_block_of_one_entry_is_a_uniform_quantiser(device: str) -> None:
    x = np.array([[-127, 0, 3, 100.4, 126.6]], np.float32)
    world = Simulated(1, Layout({"w": 5}), Grassmann(block=1, bits=0), device=device)
    np.testing.assert_allclose(world.step(x), [-127, 0, 3, 100, 127], rtol=1e-6)


def test_vectors_are_of_length_one_and_everywhere() -> None:
    vectors = codebook(8, 12, 3).vectors.astype(np.float64)
    np.testing.assert_allclose((vectors**2).sum(axis=1), 1, rtol=1e-6)
    moments = vectors.T @ vectors / len(vectors) * 8
    assert np.abs(moments - np.eye(8)).max() < 5 / np.sqrt(len(vectors)), "no direction is preferred"


def test_ranks_with_other_codebooks_are_told() -> None:
    assert Grassmann(seed=1).describe() != Grassmann(seed=2).describe()
    assert Grassmann(seed=1).describe() == Grassmann(seed=1).describe()


def test_a_message_of_another_size_is_refused() -> None:
    layout = Layout({"w": 100})
    simulation = Simulation(2, layout, Grassmann())
    other = Simulation(2, layout, Grassmann(hinge_bits=16))
    simulation.participants[1] = other.participants[1]
    with pytest.raises(ExchangeError, match="of one size"):
        simulation.allreduce(whole(2, 0, layout))


BAD = {"block": [0, 65, 2.0, True], "bits": [-1, 13, "8"], "hinge_bits": [4, 8.0, None], "seed": [-1, 2**32]}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in BAD.items() for v in values])
def test_options_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} is .*: give "):
        Grassmann(**{option: value})
