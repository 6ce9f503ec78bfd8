"""The code in which blocks of entries travel that are rounded to the lines of a codebook.

The code, in words of 32 bits, little-endian: a scale for each 1024 blocks; the numbers of the lines, in bit
planes: for each 32 blocks as many words as a number has bits, of which word b holds bit b of all 32; for
each block a whole number, its coefficient in steps of the scale; padded to a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from mpitopk.codebook import Codebook
    from mpitopk.layout import Layout
    from mpitopk.typing import Array

LONGEST = 64
"""Entries of the longest block."""


@dataclass(frozen=True, eq=False)
class Lines:
    """Blocks of a buffer of `entries`, and the lines that they are rounded to.

    Attributes
    ----------
    entries : int
    book : Codebook
    hinge_bits : int
        Bits of a coefficient, 8 or 16.
    scale_type : str
        Type of a scale.
    """

    group: ClassVar[int] = 1024
    """Blocks that share a scale."""

    entries: int
    book: Codebook
    hinge_bits: int
    scale_type: str

    @classmethod
    def of(cls, layout: Layout, book: Codebook, hinge_bits: int) -> Lines:
        """Return the blocks of a layout."""
        return cls(layout.size, book, hinge_bits, layout.accumulator)

    @property
    def block(self) -> int:
        """Entries of a block; the last one may have fewer."""
        return self.book.block

    @property
    def bits(self) -> int:
        """Bits of the number of a line."""
        return self.book.bits

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
