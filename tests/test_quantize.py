"""Rounding at random to levels, and the merge of codes: devices against a definition in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from devices import computes, opened

from mpitopk.device.base import TOO_LARGE
from mpitopk.device.hashing import splitmix64
from mpitopk.device.reference import ReferenceDevice
from mpitopk.typing import Array
from mpitopk.wire import Message, Messages, Status, message_bytes

TABLES = {
    2: [0, 1],
    3: [0, 0.125, 0.25, 1],
    4: (np.arange(8) / 7).tolist(),
    5: [0, *(0.7**j for j in range(14, -1, -1))],
    6: (np.arange(32) / 31).tolist(),
    7: (np.arange(64) / 63).tolist(),
    8: (np.arange(128) / 127).tolist(),
}
SIZES = [(0, 32), (1, 32), (33, 64), (5000, 128), (70_001, 512), (40_000, 8192)]
LEVELS = {bits: np.array(table, np.float32) for bits, table in TABLES.items()} | {
    -3: np.array([0, 1 / 3, 2 / 3, 1], np.float32),
    -4: np.array([0, 0, 0.01, 0.01, 0.5, 0.5, 1, 1], np.float32),
    -5: (np.arange(16) / 15).astype(np.float32),
    -8: np.concatenate([[0], np.geomspace(1e-6, 1, 127)]).astype(np.float32),
}


def mixed(v: int) -> int:
    v = (v ^ v >> 16) * 0x7FEB352D & 0xFFFFFFFF
    v = (v ^ v >> 15) * 0x846CA68B & 0xFFFFFFFF
    return v ^ v >> 16


def message(scales: Array, codes: Array, levels: Array | None, rank: int = 0) -> Message:
    table = np.empty(0, np.uint32) if levels is None else levels.view(np.uint32)
    words = np.concatenate([scales.view(np.uint32), table, codes])
    made = Message.blank(np.empty(message_bytes(words.size, 0, 0), np.uint8), words.size, 0, None)
    made.indices[:] = words
    made.sign(Status.FINE, 0, rank)
    return made


def gathered(messages: list[Message]) -> Messages:
    sizes = [m.buffer.size for m in messages]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    return Messages(np.concatenate([m.buffer for m in messages]), starts, sizes)


def gradient(n: int, dtype: str, seed: int = 0) -> Array:
    x = np.random.default_rng((n, seed)).standard_normal(n).astype(np.float32)
    x[n // 3 : n // 2] = 0
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "uint16" else x.astype(dtype)


def decoded(on: Any, levels: Array, bucket: int, scales: Array, codes: Array, n: int) -> Array:
    out = np.empty(n, scales.dtype)
    on.merge_codes(gathered([message(scales, codes, None)]), levels, levels.size.bit_length(), bucket, 1, out)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize(
    ("n", "bucket"), [(0, 32), (1, 32), (33, 64), (5000, 128), (70_001, 512), (40_000, 8192)]
)
@pytest.mark.parametrize("largest", [True, False])
def test_devices_agree_to_the_bit(
    device: str, dtype: str, bits: int, n: int, bucket: int, largest: bool
) -> None:
    if not computes(device, dtype):
        pytest.skip("a GPU is not used with float64")
    levels, x = LEVELS[bits], gradient(n, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    key, results = splitmix64(n + bucket), []
    for on in (ReferenceDevice(), opened(device, 3)):
        codes = np.full(-(-n // 32) * abs(bits), 7, np.uint32)
        scales = np.full(-(-n // bucket), np.nan, wide)
        assert on.quantize(x, levels, bucket, largest, key, codes, scales)
        out = np.full(n, np.nan, wide)
        other = message(scales[::-1].copy(), codes[::-1].copy(), levels)
        on.merge_codes(gathered([message(scales, codes, levels), other]), None, abs(bits), bucket, 3, out)
        alone = decoded(on, levels, bucket, scales, codes, n)
        results.append((codes, scales, out, alone, on.count_ratios(x, bucket, largest)))
    for one, two in zip(*results, strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
@pytest.mark.parametrize("bits", LEVELS)
def test_instruction_sets_agree_to_the_bit(dtype: str, bits: int) -> None:
    native = pytest.importorskip("mpitopk.device._native")
    from mpitopk.device.host import HostDevice

    levels, x = LEVELS[bits], gradient(5000, dtype)
    results = []
    for isa in native.isas():
        on = HostDevice(1, isa)
        codes = np.empty(157 * abs(bits), np.uint32)
        scales = np.empty(20, "float64" if dtype == "float64" else "float32")
        assert on.quantize(x, levels, 256, False, 3, codes, scales)
        results.append((codes.tobytes(), decoded(on, levels, 256, scales, codes, x.size).tobytes()))
    assert len(set(results)) == 1


@pytest.mark.parametrize("bits", LEVELS)
def test_ratios_at_levels_and_next_to_them(device: str, bits: int) -> None:
    levels, on = LEVELS[bits], opened(device, 1)
    at = np.concatenate([levels, np.nextafter(levels, np.float32(0)), np.nextafter(levels, np.float32(1))])
    for key in range(50):
        codes = np.empty((2, -(-at.size // 32) * abs(bits)), np.uint32)
        scales = np.empty((2, 1), np.float32)
        for i, one in enumerate((ReferenceDevice(), on)):
            assert one.quantize(at, levels, 512, True, splitmix64(key), codes[i], scales[i])
        assert (scales == 1).all()
        assert (codes[0] == codes[1]).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_instruction_sets_agree_past_the_caches(shift: int) -> None:
    """A mean that does not fit into caches is written past them, where it is aligned."""
    native = pytest.importorskip("mpitopk.device._native")
    from mpitopk.device.host import HostDevice

    n, bucket, rng = (16 << 18) + 4133, 512, np.random.default_rng(0)
    buckets, words = -(-n // bucket), -(-n // 32) * 4
    messages = [
        message(rng.random(buckets, np.float32), rng.integers(0, 1 << 32, words, np.uint32), None, rank)
        for rank in range(3)
    ]
    results = []
    for on in (ReferenceDevice(), *(HostDevice(2, isa) for isa in native.isas())):
        room = on.empty(n + 1, "float32")
        room.fill(np.nan)
        on.merge_codes(gathered(messages), LEVELS[4], 4, bucket, 3, room[shift : shift + n])
        assert np.isnan(room[shift - 1])
        results.append(room[shift : shift + n].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("largest", [True, False])
def test_codes_are_those_of_the_definition(device: str, bits: int, largest: bool) -> None:
    """In float64, but where a random number is within rounding of the threshold."""
    n, bucket, key, levels = 1000, 96, 0x0123456789ABCDEF, LEVELS[bits]
    x, on = gradient(n, "float32"), opened(device, 2)
    codes, scales = np.empty(-(-n // 32) * abs(bits), np.uint32), np.empty(-(-n // bucket), np.float32)
    assert on.quantize(x, levels, bucket, largest, key, codes, scales)
    for b in range(scales.size):
        part = x[b * bucket : (b + 1) * bucket].astype(np.float64)
        scale = max(abs(part)) if largest else math.sqrt(math.fsum(part**2))
        assert scales[b] == pytest.approx(scale, rel=1e-6)
    close = 0
    for i, value in enumerate(x.tolist()):
        code = sum((int(codes[i // 32 * abs(bits) + b]) >> i % 32 & 1) << b for b in range(abs(bits)))
        ratio = abs(value) / float(scales[i // bucket]) if value else 0.0
        u = (mixed(mixed(i ^ key & 0xFFFFFFFF) ^ key >> 32) >> 8) / 2**24
        table = [float(level) for level in levels]
        cuts = [below + u * (level - below) for below, level in pairwise(table)]
        if min(abs(ratio - at) for at in [*cuts, *table[1:]]) < 1e-7 and ratio not in (0, 1):
            close += 1
            continue
        q = sum(ratio >= level or ratio > cut for level, cut in zip(table[1:], cuts, strict=True))
        assert code == 2 * q + (math.copysign(1, value) < 0)
    assert close < 5


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_corners(device: str, bits: int, largest: bool) -> None:
    on, levels = opened(device, 1), LEVELS[bits]
    tiny, big = np.float32(1e-45), np.nextafter(np.float32(TOO_LARGE["float32"]), np.float32(0))
    for x in (
        [0.0],
        [-0.0] * 40,
        [5.0],
        [-7e28] * 3,
        [tiny],
        [tiny, -tiny, 0],
        [big] * 64,
        [1, tiny],
        [1e-30] * 90,
    ):
        g = np.array(x, np.float32)
        codes, scales = np.empty(-(-g.size // 32) * bits, np.uint32), np.empty(-(-g.size // 64), np.float32)
        for key in range(3):
            assert on.quantize(g, levels, 64, largest, splitmix64(key), codes, scales)
            got = decoded(on, levels, 64, scales, codes, g.size)
            assert np.isfinite(got).all()
            assert np.isfinite(scales).all()
            assert (np.abs(got) <= np.repeat(scales, 64)[: g.size]).all()
            assert (got[g == 0] == 0).all()
            if largest or np.count_nonzero(g) == 1:
                top = np.abs(g) == np.abs(g).max()
                assert got[top].tobytes() == (g[top] + 0).tobytes(), "a ratio of 1 is the top level, always"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 63, 64, 99])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_not_finite_is_found(device: str, bad: float, where: int, dtype: str) -> None:
    x = np.ones(100, np.float32)
    x[where] = bad
    x = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "uint16" else x.astype(dtype)
    on, codes, scales = opened(device, 2), np.empty(16, np.uint32), np.empty(2, np.float32)
    for largest in (True, False):
        assert not on.quantize(x, LEVELS[4], 64, largest, 1, codes, scales)
        assert on.count_ratios(x, 64, largest)[193] > 0


@pytest.mark.parametrize("largest", [True, False])
def test_ratios_are_counted(device: str, largest: bool) -> None:
    x, on = gradient(1000, "float32"), opened(device, 3)
    x[:5] = 1e-9, -1e-3, 0, 4, -4
    x[128:192] = 0
    expected = [0] * 194
    for b in range(0, 1000, 64):
        part = x[b : b + 64].astype(np.float64)
        scale = np.float32(max(abs(part)) if largest else math.sqrt(math.fsum(part**2)))
        for value in abs(part) if scale > 0 else []:
            ratio = float(np.float32(value / scale))
            edges = [(1 + i % 8 / 8) * 2.0 ** (i // 8 - 24) for i in range(193)]
            expected[max(0, sum(edge <= ratio for edge in edges) - 1)] += 1
    counts = on.count_ratios(x, 64, largest)
    assert counts.tolist() == expected
    assert sum(expected) < 1000
    assert (counts[192] > 0) == largest
