"""Random numbers without a state: hashes of a key and a number, the same on every device and machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpitopk.typing import Array

FEISTEL_ROUNDS = 6
Word = TypeVar("Word", int, npt.NDArray[Any])


def splitmix64(z: Word) -> Word:
    """Return 64 well-mixed bits of a number, or of each of an array (Steele, Lea & Flood 2014)."""
    mask = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def permuted(count: int, size: int, key: int) -> Array:
    """Return where a keyed permutation of `range(size)` takes 0, 1, ... count - 1 (unordered)."""
    half = (max(8, (size - 1).bit_length()) + 1) // 2
    mask = np.uint32((1 << half) - 1)
    round_keys = [np.uint32(splitmix64(splitmix64(key) + r) & 0xFFFFFFFF) for r in range(FEISTEL_ROUNDS)]
    x = np.arange(count, dtype=np.uint64)
    walking = np.arange(count)
    while walking.size:
        left = (x[walking] >> np.uint64(half)).astype(np.uint32)
        right = x[walking].astype(np.uint32) & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix32(right ^ round_key) & mask)
        x[walking] = left.astype(np.uint64) << np.uint64(half) | right
        walking = walking[x[walking] >= size]
    return x


def mix32(v: Array) -> Array:
    """Return 32 well-mixed bits for each uint32: a bijection."""
    v = (v ^ v >> np.uint32(16)) * np.uint32(0x7FEB352D)
    v = (v ^ v >> np.uint32(15)) * np.uint32(0x846CA68B)
    mixed: Array = v ^ v >> np.uint32(16)
    return mixed


def uniform(key: int, count: int) -> Array:
    """Return `count` random numbers in [0, 1), float32 with 24 bits: see `Device.quantize`."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    bits = mix32(mix32(np.arange(count, dtype=np.uint32) ^ low) ^ high)
    numbers: Array = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    return numbers


def sampled(count: int, size: int, key: int) -> Array:
    """Return one position out of each of `count` equal parts of `range(size)`, ascending."""
    number = np.arange(count, dtype=np.uint64)
    drawn = splitmix64(np.uint64(key) + number) >> np.uint64(33)
    parts = number * np.uint64(size)
    inside = (parts % np.uint64(count) << np.uint64(31)) + drawn * np.uint64(size)
    where: Array = parts // np.uint64(count) + inside // (np.uint64(count) << np.uint64(31))
    return where
