"""Elias's recursive (omega) code of levels in bit planes, in plain Python: the oracle of the compiled one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpitopk.typing import Array


def omega(n: int) -> str:
    """Return the code of a number from 1: "0" behind n in binary, behind the number of its bits less 1, ...

    Elias, "Universal codeword sets and representations of the integers", 1975.

    Examples
    --------
    >>> [omega(n) for n in (1, 2, 3, 4, 16)]
    ['0', '100', '110', '101000', '10100100000']
    """
    text = "0"
    while n > 1:
        text = f"{n:b}{text}"
        n = n.bit_length() - 1
    return text


def _number(text: str, at: int) -> tuple[int, int]:
    """Return the number whose code begins at a place, and where it ends; `ValueError` if there is none."""
    n = 1
    while text[at : at + 1] == "1":
        at, n = at + n + 1, int(text[at : at + n + 1], 2) if at + n < len(text) else 1 << 60
    if text[at : at + 1] != "0":
        raise ValueError("the code ends too early")
    return n, at + 1


def _levels(codes: Array, bits: int) -> Array:
    planes = codes.reshape(-1, bits, 1) >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    shifted = planes << np.arange(bits, dtype=np.uint32)[:, None]
    levels: Array = np.add.reduce(shifted, axis=1, dtype=np.uint32).reshape(-1)
    return levels


def encode(codes: Array, bits: int, size: int, bucket: int, out: Array) -> int:
    """See `Device.to_elias`."""
    code, buckets = _levels(codes, bits)[:size], -(-size // bucket)
    end = 2 * buckets
    for b in range(buckets):
        part = code[b * bucket : (b + 1) * bucket]
        some = np.flatnonzero(part >> 1)
        gaps = np.diff(some, prepend=-1).tolist()
        entries = zip(gaps, part[some].tolist(), strict=True)
        text = "".join(f"{omega(gap)}{each & 1}{omega(each >> 1)}" for gap, each in entries)
        words = [int(text[i : i + 32].ljust(32, "0"), 2) for i in range(0, len(text), 32)]
        out[2 * b : 2 * b + 2] = len(text), some.size
        out[end : end + len(words)] = words
        end += len(words)
    return end


def decode(words: Array, bits: int, size: int, bucket: int, codes: Array) -> bool:
    """See `Device.from_elias`."""
    buckets, code = -(-size // bucket), np.zeros(-(-size // 32) * 32, np.uint32)
    extents = words[: 2 * buckets].reshape(-1, 2).tolist() if words.size >= 2 * buckets else [(-1, 0)]
    if 2 * buckets + sum(-(-length // 32) for length, _ in extents) != words.size:
        return False
    start = 2 * buckets
    for b, (length, entries) in enumerate(extents):
        stop = start + -(-length // 32)
        text = "".join(f"{word:032b}" for word in words[start:stop].tolist())[:length]
        try:
            _fill(text, entries, 1 << bits - 1, code[b * bucket : min(size, (b + 1) * bucket)])
        except ValueError:
            return False
        start = stop
    planes = code.reshape(-1, 1, 32) >> np.arange(bits, dtype=np.uint32)[:, None] & np.uint32(1)
    codes[:] = np.bitwise_or.reduce(planes << np.arange(32, dtype=np.uint32), axis=2).reshape(-1)
    return True


def _fill(text: str, entries: int, levels: int, code: Array) -> None:
    at, place = 0, -1
    for _ in range(entries):
        gap, at = _number(text, at)
        sign = int(text[at : at + 1], 2)
        level, at = _number(text, at + 1)
        place += gap
        if place >= code.size or level >= levels:
            raise ValueError("the code is of another bucket")
        code[place] = 2 * level + sign
    if at != len(text):
        raise ValueError("something is left")
