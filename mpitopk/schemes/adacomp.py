"""AdaComp: entries that stand out in their bin, by sign alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from mpitopk.bins import LARGEST, Bins
from mpitopk.collectives import Allgatherv
from mpitopk.errors import ConfigError
from mpitopk.schemes.base import About, Rank, Scheme, Sparse, Steps
from mpitopk.schemes.sparsifier import Memory
from mpitopk.wire import Message, message_bytes

if TYPE_CHECKING:
    from mpitopk.typing import Array


class Binned(Memory):
    """Error feedback, and what is chosen in each bin."""

    def __init__(self, rank: Rank, size: int) -> None:
        super().__init__(rank)
        self.bins = bins = Bins.of(rank.layout, size)
        self.marks = rank.device.empty(bins.total * bins.mark_words, "uint32")
        self.counts = rank.device.empty(bins.total, bins.count_type)
        self.scales = rank.device.empty(len(bins.rows), bins.scale_type)
        self._layout = rank.layout.digest

    def message_of(self, entries: int) -> Message:
        """Return a blank message with room for so many entries."""
        words = self.bins.words(entries)
        room = self.grown("send", message_bytes(words, 0, 0))
        return Message.blank(room, words, 0, None, self._layout)


@dataclass(frozen=True)
class AdaComp(Scheme):
    """Send the sign of entries that the last gradient makes stand out in their bin; keep the rest.

    Chen et al., "AdaComp: adaptive residual gradient compression for data-parallel distributed
    training", AAAI 2018, arXiv 1712.02679. With r the residual, d the gradient and G = r + d, an entry is
    sent if |r + scale d| is at least the largest |G| of its bin: how many are is decided by the gradient.
    It travels as its place in the bin and its sign, and counts as sign(G) s, where s is the mean over the
    bins of its segment of their largest |G|; what that rounds stays in the residual. An entry that is zero
    in G is never sent. The bits of a message are ours.

    Parameters
    ----------
    bin : int
        Entries of a bin, from 1 to 32768. The authors take 50 for convolutions, 500 for other layers.
    scale : float
        Above 1; the authors take 2. More sends more.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    An entry takes 1 byte in bins of up to 128 entries, above that 2; each bin 1 byte, or 2 with 256 entries
    and more; each segment one number. While the residual is zero, as in the first step, all entries of at
    least 1 / `scale` of the largest of their bin are sent.

    Examples
    --------
    >>> AdaComp(bin=50).describe()
    'AdaComp(bin=50, scale=2.0)'
    """

    about = About("Chen et al. 2018", "places and signs; a scale a segment", "allgatherv", "2 n")

    bin: int = 500
    scale: float = 2.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if type(self.bin) is not int or not 1 <= self.bin <= LARGEST:
            raise ConfigError(f"bin is {self.bin!r}: give a whole number from 1 to {LARGEST}")
        if not isinstance(self.scale, int | float) or not 1 < self.scale < inf:
            raise ConfigError(f"scale is {self.scale!r}: give a number above 1")

    def init(self, rank: Rank) -> Binned:
        return Binned(rank, self.bin)

    def stand_in(self, state: Binned) -> None:  # noqa: ARG002 (sizes are exchanged first)
        return None

    def step(self, rank: Rank, state: Binned, gradient: Array, sparse: bool) -> Steps:
        device, bins, chosen = rank.device, state.bins, (state.marks, state.counts, state.scales)
        entries = device.select_bins(gradient, state.residual, state.spare, bins, self.scale, *chosen)
        message = state.message_of(entries or 0)
        if entries is not None:
            device.pack_bins(state.spare, bins, *chosen, message.indices)
        messages = yield Allgatherv(message, fixed=False, finite=entries is not None)
        rank.sent, mean = entries or 0, state.residual
        rank.held = device.merge_bins(messages, bins, rank.size, mean)
        state.commit()
        return Sparse(*device.nonzero(mean)) if sparse else mean
