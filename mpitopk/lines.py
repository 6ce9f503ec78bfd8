"""A codebook of lines through the origin, and the code in which blocks of entries travel.

The code, in words of 32 bits, little-endian: a scale for each 1024 blocks; the numbers of the lines, in bit
planes: for each 32 blocks as many words as a number has bits, of which word b holds bit b of all 32; for
each block a whole number, its coefficient in steps of the scale; padded to a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpitopk.device.hashing import splitmix64

if TYPE_CHECKING:
    from mpitopk.layout import Layout
    from mpitopk.typing import Array

LONGEST = 64
"""Entries of the longest block."""

COLUMNS = 32
"""Vectors that devices compare with at once; the host takes less."""


@cache
def codebook(block: int, bits: int, seed: int) -> Array:
    """Return 2**bits unit vectors, nearly uniform in direction: float32, shape (2**bits, block).

    Each coordinate is a sum of seven random numbers of 16 bits, so nearly normal; an odd one, so that no
    vector is zero. What follows is sums, products, quotients and roots in float64, which every machine
    rounds alike.
    """
    size = 2 * block << bits
    words = splitmix64(np.arange(size, dtype=np.uint64) + np.uint64(splitmix64(seed)))
    halves = words.astype("<u8").view("<u2").reshape(-1, block, 8)[:, :, :7].astype(np.int64)
    drawn = 2 * halves.sum(axis=2) - 7 * 65535
    squares = (drawn * drawn).sum(axis=1)  # exact in float64 too
    vectors: Array = (drawn / np.sqrt(squares.astype(np.float64))[:, None]).astype(np.float32)
    return vectors


def digest(vectors: Array) -> str:
    """Return a short text that two codebooks share if and only if (almost surely) they are equal."""
    return blake2b(vectors.astype("<f4").tobytes(), digest_size=6).hexdigest()


@dataclass(frozen=True, eq=False)
class Lines:
    """Blocks of a buffer of `entries`, and the lines that they are rounded to.

    Attributes
    ----------
    entries : int
    vectors : float32 array, shape (2**bits, block)
        A unit vector of each line.
    hinge_bits : int
        Bits of a coefficient, 8 or 16.
    scale_type : str
        Type of a scale.
    """

    group: ClassVar[int] = 1024
    """Blocks that share a scale."""

    entries: int
    vectors: Array
    hinge_bits: int
    scale_type: str

    @classmethod
    def of(cls, layout: Layout, vectors: Array, hinge_bits: int) -> Lines:
        """Return the blocks of a layout."""
        return cls(layout.size, vectors, hinge_bits, layout.accumulator)

    @property
    def block(self) -> int:
        """Entries of a block; the last one may have fewer."""
        return int(self.vectors.shape[1])

    @property
    def bits(self) -> int:
        """Bits of the number of a line."""
        return len(self.vectors).bit_length() - 1

    @cached_property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.entries // self.block)

    @cached_property
    def chunks(self) -> int:
        """How many stretches of 32 blocks there are."""
        return -(-self.blocks // 32)

    @cached_property
    def groups(self) -> int:
        """How many scales there are."""
        return -(-self.blocks // self.group)

    @property
    def most(self) -> int:
        """The largest coefficient, in steps."""
        return (1 << self.hinge_bits - 1) - 1

    @cached_property
    def columns(self) -> Array:
        """The vectors as columns, and zeros up to a multiple of `COLUMNS`: float32, shape (block, m)."""
        more = -len(self.vectors) % COLUMNS
        return np.ascontiguousarray(np.pad(self.vectors, ((0, more), (0, 0))).T)

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """Where bit planes and coefficients begin in the code, in words."""
        planes = self.groups * np.dtype(self.scale_type).itemsize // 4
        return planes, planes + self.chunks * self.bits

    @cached_property
    def words(self) -> int:
        """Words of the code."""
        return self.offsets[1] + (self.blocks * self.hinge_bits + 31) // 32

    def parts(self, words: Array) -> tuple[Array, Array, Array]:
        """Return views of the scales, the bit planes and the coefficients in words of code."""
        planes, at = self.offsets
        hinges = words[at:].view(f"i{self.hinge_bits // 8}")[: self.blocks]
        return words[:planes].view(self.scale_type), words[planes:at], hinges
