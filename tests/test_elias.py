"""Elias's code: its lengths, that it can be undone, that damage is found, and QSGD with it."""

from __future__ import annotations

from typing import Any

import bodies
import numpy as np
import oracle
import pytest
from devices import opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import LAYOUT, SEGMENTS, Mpi, Simulated, whole

from mpitopk import QSGD, Layout, Simulation
from mpitopk.device.elias import encode, omega
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.typing import Array
from mpitopk.wire import HEADER, Messages

some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
quiet = pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning")
ELIAS = QSGD(bits=4, bucket=64, norm="l2", coding="elias")


def refused_on(device: str) -> bool:
    """A GPU does not have it, and says so."""
    if device != "cuda":
        return False
    with pytest.raises(
        ConfigError, match="coding is 'elias', which device='cuda' does not have: give 'fixed'"
    ):
        Simulation(1, LAYOUT, ELIAS, device=device)
    return True


def planes(codes: list[int], bits: int) -> Array:
    """Codes, one after the other, in bit planes."""
    words = np.zeros(-(-len(codes) // 32) * bits, np.uint32)
    for i, code in enumerate(codes):
        for b in range(bits):
            words[i // 32 * bits + b] |= np.uint32((code >> b & 1) << i % 32)
    return words


def room(size: int, bucket: int) -> Array:
    return np.zeros(15 * -(-size // 32) + 2 * -(-size // bucket), np.uint32)


def test_lengths() -> None:
    known = {1: 1, 2: 3, 3: 3, 4: 6, 7: 6, 8: 7, 15: 7, 16: 11, 31: 11, 100: 13}
    assert {n: len(omega(n)) for n in known} == known


@some
@given(bits=st.integers(2, 8), bucket=st.sampled_from([32, 64, 128]), data=st.data())
def test_there_and_back(device: str, bits: int, bucket: int, data: st.DataObject) -> None:
    """All levels and signs; that of 0 is lost."""
    if refused_on(device):
        return
    code = st.one_of(st.just(0), st.integers(0, 2**bits - 1))
    codes = data.draw(st.lists(code, max_size=300))
    on, size, back = opened(device, 2), len(codes), planes([7] * len(codes), bits)
    out, expected = room(size, bucket), room(size, bucket)
    used = on.to_elias(planes(codes, bits), bits, size, bucket, out)
    assert used == encode(planes(codes, bits), bits, size, bucket, expected)
    assert out[:used].tolist() == expected[:used].tolist()
    assert on.from_elias(out[:used], bits, size, bucket, back)
    assert back.tolist() == planes([c if c > 1 else 0 for c in codes], bits).tolist()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 31, 32, 255, 4096, 65534, 65535])
def test_every_gap(device: str, at: int) -> None:
    if refused_on(device):
        return
    for first in {0, at // 2, at}:
        codes = np.zeros(65536, np.int64)
        codes[[first, at]] = 3
        words, out, back = planes(codes.tolist(), 2), room(65536, 65536), np.empty(4096, np.uint32)
        used = opened(device, 1).to_elias(words, 2, 65536, 65536, out)
        text = [omega(first + 1), *([omega(at - first)] if at > first else [])]
        assert out[:2].tolist() == [sum(map(len, text)) + 2 * len(text), len(text)]
        assert opened(device, 1).from_elias(out[:used], 2, 65536, 65536, back)
        assert back.tolist() == words.tolist()


@some
@given(st.data())
def test_damage_is_found_or_decodes_to_codes(device: str, data: st.DataObject) -> None:
    """On every device the same; what is cut off is always found."""
    if refused_on(device):
        return
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    codes, out = rng.integers(0, 16, 150).tolist(), room(150, 64)
    on, numpy = opened(device, 2), opened("numpy", 1)
    used = on.to_elias(planes(codes, 4), 4, 150, 64, out)
    whole_code, backs = out[:used], [np.zeros(20, np.uint32) for _ in range(2)]
    cut = data.draw(st.integers(0, used - 1))
    assert not on.from_elias(whole_code[:cut].copy(), 4, 150, 64, backs[0])
    whole_code[data.draw(st.integers(0, used - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    right = [each.from_elias(whole_code, 4, 150, 64, to) for each, to in zip((on, numpy), backs, strict=True)]
    assert right[0] == right[1]
    assert not right[0] or backs[0].tolist() == backs[1].tolist()


def test_bits_of_an_entry() -> None:
    """Alistarh et al., section 3.1: at most 2.8 n + 32 bits with s = sqrt(n) levels. Here n = 31**2."""
    n, scheme = 961, QSGD(bits=6, bucket=992, norm="l2", coding="elias")
    simulation = Simulation(1, Layout({"w": n}), scheme)
    found = []
    for step in range(20):
        g = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        simulation.allreduce([g])
        state: Any = simulation.participants[0].state
        out = room(n, 992)
        encode(state.codes, 6, n, 992, out)
        found.append((int(out[0]) + 32) / n)
    assert 2.5 < np.mean(found) <= 2.8 + 32 / n


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_the_mean_is_that_of_fixed_width(ranks: int, norm: str, device: str) -> None:
    if refused_on(device):
        return
    schemes = [QSGD(bucket=64, norm=norm, coding=coding) for coding in ("fixed", "elias")]
    fixed, elias = (Simulated(ranks, LAYOUT, scheme, device=device) for scheme in schemes)
    for g in (whole(ranks, 0), whole(ranks, 1), np.zeros((ranks, LAYOUT.size), np.float32)):
        np.testing.assert_array_equal(fixed.step(g), elias.step(g))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bytes(ranks: int) -> None:
    """What the definition writes for every other rank, and a header."""
    simulation, n = Simulation(ranks, LAYOUT, ELIAS), LAYOUT.size
    simulation.allreduce(whole(ranks, 3))
    expected = 0
    for participant in simulation.participants[1:]:
        state: Any = participant.state
        words = -(-n // 64) + encode(state.codes, 4, n, 64, room(n, 64))
        expected += HEADER.size + -(-words // 2) * 8
    assert simulation.bytes == expected


@pytest.mark.parametrize("size", [1, 4, 7])
def test_simulated_ranks(size: int, device: str) -> None:
    if refused_on(device):
        return
    expected = oracle.Quantizer(size, SEGMENTS, bucket=64, norm="l2")
    bodies.follows(Simulated(size, LAYOUT, ELIAS, device=device), expected, 10)


@pytest.mark.mpi
@quiet
def test_real_ranks(comm: Any, device: str) -> None:
    if refused_on(device):
        return
    expected = oracle.Quantizer(comm.size, SEGMENTS, bucket=64, norm="l2")
    bodies.follows(Mpi(comm, LAYOUT, ELIAS, device=device), expected, 10)


@pytest.mark.mpi
@quiet
@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_ranks_fail_together(comm: Any, what: str, device: str) -> None:
    if refused_on(device):
        return
    broken = bodies.broken_gradients(comm.size, comm.size - 1)[what]
    bodies.fails_without_trace(Mpi(comm, LAYOUT, ELIAS, device=device), *broken)


@pytest.mark.parametrize("what", ["nan", "size"])
def test_a_failed_step_leaves_no_trace(what: str, device: str) -> None:
    if refused_on(device):
        return
    broken = bodies.broken_gradients(3, 2)[what]
    bodies.fails_without_trace(Simulated(3, LAYOUT, ELIAS, device=device), *broken)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_tiny_buffers(n: int, device: str) -> None:
    if refused_on(device):
        return
    world = Simulated(3, Layout({"w": n}), QSGD(coding="elias"), device=device)
    np.testing.assert_array_equal(world.step(np.full((3, n), 2.5, np.float32)), np.full(n, 2.5))


def test_a_damaged_message_is_refused() -> None:
    simulation = Simulation(2, LAYOUT, ELIAS)
    simulation.allreduce(whole(2, 0))
    state: Any = simulation.participants[0].state
    good, bad = (state.outgoing().buffer.copy() for _ in range(2))
    bad[HEADER.size + 4 * 3] ^= 1  # how many bits the first bucket has
    messages = Messages(np.concatenate([good, bad]), [0, good.size], [good.size] * 2)
    with pytest.raises(ExchangeError, match="the message of rank 1 has codes that do not fill its buckets"):
        state.incoming(messages)


def test_an_unknown_coding() -> None:
    with pytest.raises(ConfigError, match="coding is 'huffman': known: fixed, elias"):
        QSGD(coding="huffman")
