"""A codebook of lines through the origin, as a tree of two levels that is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.device.hashing import splitmix64

if TYPE_CHECKING:
    from mpitopk.typing import Array

STEPS = 8
"""Steps of Lloyd's algorithm."""

SAMPLES = 64
"""Random directions for each vector that is wanted..."""

MOST_SAMPLES = 1 << 16
"""...but no more than these in all, unless more vectors are wanted."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """A tree of two levels: branches, each with a representative, and as many vectors in each of them.

    Attributes
    ----------
    representatives : float32 array, shape (branches, block)
    vectors : float32 array, shape (2**bits, block)
        A unit vector of each line; those of a branch one after the other.
    """

    representatives: Array
    vectors: Array

    @property
    def block(self) -> int:
        """Entries of a vector."""
        return int(self.vectors.shape[1])

    @property
    def bits(self) -> int:
        """Bits of the number of a line."""
        return len(self.vectors).bit_length() - 1

    @property
    def members(self) -> int:
        """Vectors of a branch."""
        return len(self.vectors) // len(self.representatives)

    @cached_property
    def digest(self) -> str:
        """A short text that two codebooks share if and only if (almost surely) they are equal."""
        tree = np.concatenate([self.representatives, self.vectors])
        return blake2b(tree.astype("<f4").tobytes(), digest_size=6).hexdigest()


@cache
def codebook(block: int, bits: int, seed: int) -> Codebook:
    """Return a tree of 2**bits unit vectors in 2**(bits // 2) branches, made for normal blocks.

    Lloyd's algorithm finds representatives of random directions, and then, in each branch, vectors of those
    directions that are nearest to its representative. The first directions are what it starts from. A vector
    that it takes to another branch is left where it started, so that a search by branches finds every vector;
    where a branch has too few directions, its representative takes the place of a vector.

    All is in whole numbers that float64 holds exactly, so that sums are the same in any order, and in
    quotients and roots of them, which every machine rounds alike.
    """
    branches = 1 << bits // 2
    members = (1 << bits) // branches
    directions = drawn(max(1 << bits, min(SAMPLES << bits, MOST_SAMPLES)), block, seed)
    representatives = trained(directions, whole(directions[:branches]))
    of_branch, _ = nearest(directions, representatives)
    vectors = np.repeat(representatives, members, axis=0).reshape(branches, members, block)
    for branch in range(branches):
        mine = directions[of_branch == branch]
        vectors[branch, : len(mine)] = whole(mine[:members])
        moved = trained(mine, vectors[branch])
        stayed = nearest(moved, representatives)[0] == branch
        vectors[branch, stayed] = moved[stayed]
    return Codebook(rounded(representatives), rounded(vectors.reshape(-1, block)))


def drawn(count: int, block: int, seed: int) -> Array:
    """Return random directions: float64, shape (count, block), odd whole numbers below 2**19.

    Each is a sum of seven random numbers of 16 bits, so nearly normal; none is zero.
    """
    words = splitmix64(np.arange(2 * block * count, dtype=np.uint64) + np.uint64(splitmix64(seed)))
    halves = words.astype("<u8").view("<u2").reshape(count, block, 8)[:, :, :7]
    sums: Array = (2 * halves.sum(axis=2, dtype=np.int64) - 7 * 65535).astype(np.float64)
    return sums


def nearest(rows: Array, vectors: Array) -> tuple[Array, Array]:
    """Return which vector has the largest |product| with each row, the first of equals, and the product."""
    products = rows @ vectors.T
    numbers = np.abs(products).argmax(axis=1)
    return numbers, products[np.arange(len(rows)), numbers]


def trained(directions: Array, vectors: Array) -> Array:
    """Return vectors after steps to the sum of the directions nearest to each, turned to its side."""
    for _ in range(STEPS):
        numbers, products = nearest(directions, vectors)
        signs = np.sign(products)
        sums = [np.bincount(numbers, signs * x, len(vectors)) for x in directions.T]
        moved = np.stack(sums, axis=1)
        some = moved.any(axis=1)
        vectors = vectors.copy()
        vectors[some] = whole(moved[some])
    return vectors


def whole(vectors: Array) -> Array:
    """Return vectors in the same directions, of length 2**16, but for rounding to whole numbers."""
    large = np.rint(vectors / np.abs(vectors).max(axis=1, keepdims=True) * 2**20)
    numbers: Array = np.rint(large / np.sqrt((large * large).sum(axis=1, keepdims=True)) * 2**16)
    return numbers


def rounded(vectors: Array) -> Array:
    """Return unit vectors in float32."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    unit: Array = (vectors / lengths).astype(np.float32)
    return unit
