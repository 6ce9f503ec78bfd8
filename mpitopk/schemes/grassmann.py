"""A hierarchical Grassmannian quantiser: blocks as multiples of the nearest line of a codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitopk.codebook import Codebook, codebook
from mpitopk.collectives import Allgatherv
from mpitopk.errors import ConfigError
from mpitopk.lines import LONGEST, Lines
from mpitopk.schemes.base import About, Rank, Scheme, Sparse, Steps, check_seed
from mpitopk.schemes.sparsifier import Memory
from mpitopk.wire import Message, message_bytes

if TYPE_CHECKING:
    from mpitopk.typing import Array

MOST_BITS = 12
HINGES = (8, 16)


class Coded(Memory):
    """Error feedback, and a message of one size."""

    def __init__(self, rank: Rank, scheme: Grassmann) -> None:
        super().__init__(rank)
        self.lines = Lines.of(rank.layout, scheme.book, scheme.hinge_bits)
        room = self.grown("send", message_bytes(self.lines.words, 0, 0))
        self.message = Message.blank(room, self.lines.words, 0, None, rank.layout.digest)


@dataclass(frozen=True)
class Grassmann(Scheme):
    """Send for each block of entries the nearest line of a codebook, and a coefficient; keep the error.

    After Du, Yang & Huang, "High-dimensional stochastic gradient quantization for communication-efficient
    edge learning", IEEE Transactions on Signal Processing 2020, arXiv 1910.03865. **Our reconstruction**
    from the structure in its abstract: blocks on the Grassmann manifold of lines, put together by a hinge
    vector of coefficients. Ours are the codebook, a uniform quantiser for the hinge vector instead of a
    second codebook, one number of bits for all blocks, and error feedback, since the line is a biased
    estimate. Claims of the paper are not claims of this.

    A block x of residual + gradient becomes h c with c a unit vector of the codebook and h = <x, c>, which
    leaves |x|^2 - h^2. The coefficients of 1024 blocks are rounded to whole steps of the largest one.

    The search is one of two levels, as in tree-structured vector quantisation (Buzo, Gray, Gray & Markel,
    "Speech coding based upon vector quantization", IEEE Transactions on Acoustics, Speech, and Signal
    Processing 1980): of 2**(bits // 2) branches the one whose representative r has the largest
    |<x, r>|, and of the vectors c in it that of the largest |<x, c>|. One in another branch may be nearer.
    In return it takes few products, and the tree is trained: on random normal blocks, at construction.

    Parameters
    ----------
    block : int
        Entries of a block, from 1 to 64.
    bits : int
        The codebook has 2**bits vectors; from 0 to 12. Encoding takes about 2 * 2**(bits / 2) products
        for each entry.
    hinge_bits : {8, 16}
        Bits of a coefficient.
    seed : int
        In [0, 2**32): from which the codebook is made.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    Sends (bits + hinge_bits) / block bits for each entry, and 1 / 32 more for each block: a scale.
    What two ranks compare at construction includes a digest of the codebook.

    Examples
    --------
    >>> Grassmann().describe()
    'Grassmann(block=8, bits=8, hinge_bits=8, seed=0), codebook 0ff288e6e006'
    """

    about = About("after Du, Yang & Huang 2020", "lines and coefficients of blocks", "allgatherv", "2 n")

    block: int = 8
    bits: int = 8
    hinge_bits: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        ranges = {"block": (1, LONGEST), "bits": (0, MOST_BITS)}
        for option, (least, most) in ranges.items():
            value = getattr(self, option)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{option} is {value!r}: give a whole number from {least} to {most}")
        check_seed(self.seed)
        if type(self.hinge_bits) is not int or self.hinge_bits not in HINGES:
            raise ConfigError(f"hinge_bits is {self.hinge_bits!r}: give 8 or 16")

    @property
    def book(self) -> Codebook:
        """The codebook."""
        return codebook(self.block, self.bits, self.seed)

    def describe(self) -> str:
        return f"{super().describe()}, codebook {self.book.digest}"

    def init(self, rank: Rank) -> Coded:
        return Coded(rank, self)

    def stand_in(self, state: Coded) -> Allgatherv:
        return Allgatherv(state.message)

    def step(self, rank: Rank, state: Coded, gradient: Array, sparse: bool) -> Steps:
        device, lines, message = rank.device, state.lines, state.message
        finite = device.encode_lines(gradient, state.residual, state.spare, lines, message.indices)
        messages = yield Allgatherv(message, finite=finite)
        mean = state.residual
        device.merge_lines(messages, lines, rank.size, mean)
        rank.sent = rank.held = rank.layout.size
        state.commit()
        return Sparse(*device.nonzero(mean)) if sparse else mean
