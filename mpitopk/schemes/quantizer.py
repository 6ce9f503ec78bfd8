"""What the schemes share that round every entry to a few levels: options, codes and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpitopk.collectives import Allgatherv
from mpitopk.errors import ConfigError, nearest
from mpitopk.schemes.base import Rank, Scheme, Whole, check_seed
from mpitopk.wire import Message, message_bytes

if TYPE_CHECKING:
    from mpitopk.typing import Array

NORMS = ("max", "l2")
MAX_BUCKET = 65536


@dataclass(frozen=True)
class Quantizer(Scheme):
    """Options of every scheme that rounds at random, without bias and without memory.

    In each bucket of consecutive entries, with a scale of its own on each rank, an entry becomes its sign
    and one of the two levels around the ratio of its magnitude and the scale, with the probabilities that
    make the mean right. P ranks divide the variance that this adds by P. The random numbers depend on
    seed, step, rank and entry only.

    Parameters
    ----------
    bits : int
        Bits of an entry, from 2 to 8, its sign included: 2**(bits - 1) levels of magnitude, from 0 to 1.
    bucket : int
        Entries that share a scale: a multiple of 32 up to 65536. The last bucket may be shorter.
    norm : {"max", "l2"}
        The scale: the largest magnitude of the bucket, or its 2-norm.
    seed : int
        In [0, 2**32).
    """

    shortens = True

    bits: int = 4
    bucket: int = 512
    norm: str = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not _whole(self.bits) or not 2 <= self.bits <= 8:
            raise ConfigError(f"bits is {self.bits!r}: give a whole number from 2 to 8")
        if not _whole(self.bucket) or not 0 < self.bucket <= MAX_BUCKET or self.bucket % 32:
            raise ConfigError(f"bucket is {self.bucket!r}: give a multiple of 32 up to {MAX_BUCKET}")
        if self.norm not in NORMS:
            raise ConfigError(f"norm is {self.norm!r}: {nearest(str(self.norm), NORMS)}")
        check_seed(self.seed)

    @property
    def top(self) -> int:
        """The number of levels above 0."""
        return (1 << self.bits - 1) - 1

    def words(self, size: int, dtype: str) -> tuple[int, int]:
        """Return how many words the scales and the codes of so many entries take."""
        return -(-size // self.bucket) * (np.dtype(dtype).itemsize // 4), -(-size // 32) * self.bits

    def stand_in(self, state: Codes) -> Any:
        return Allgatherv(state.message)

    def encode(self, rank: Rank, state: Coding, gradient: Array, levels: Array) -> bool:
        """Write the codes and scales of a gradient to the message; return whether all of it is finite."""
        key, largest = rank.key(self.seed), self.norm == "max"
        return rank.device.quantize(gradient, levels, self.bucket, largest, key, state.codes, state.scales)


class Coding(Protocol):
    """Where a message has its codes and scales."""

    codes: Array
    scales: Array


class Codes(Whole):
    """The message of a quantiser: scales, its levels where they are not known to all, and codes."""

    def __init__(self, rank: Rank, scheme: Quantizer, *, levels: int) -> None:
        super().__init__(rank)
        layout, device = rank.layout, rank.device
        scales, codes = scheme.words(layout.size, layout.accumulator)
        words = scales + levels + codes
        room = device.empty(message_bytes(words, 0, 0), "uint8")
        self.message = Message.blank(room, words, 0, None, layout.digest)
        self.scales = self.message.indices[:scales].view(layout.accumulator)
        self.levels_sent = self.message.indices[scales : scales + levels].view("float32")
        self.codes = self.message.indices[scales + levels :]


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
