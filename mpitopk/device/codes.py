"""The operations of a device on what travels in other forms than indices and values.

The rules of `mpitopk.device.base` hold. A message of code is words, as indices alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from mpitopk.errors import ConfigError

if TYPE_CHECKING:
    from mpitopk.bins import Bins
    from mpitopk.lines import Lines
    from mpitopk.typing import Array
    from mpitopk.wire import Messages


class Codes(ABC):
    """What a device can do with bins, with levels and with lines."""

    name: str

    @abstractmethod
    def select_bins(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        bins: Bins,
        factor: float,
        marks: Array,
        counts: Array,
        scales: Array,
    ) -> int | None:
        """Write residual + gradient to `out`: T[n], and choose entries of each bin.

        Chosen are those whose |residual + factor gradient| is at least the largest |out| of the bin, and
        whose `out` is not zero. Bit i of the words of a bin in `marks`: uint32[bins.total *
        bins.mark_words] is set where its entry i is one of them; `counts`: bins.count_type[bins.total]
        receives how many of each bin are. `scales`: T[m] receives of each segment the mean of the largest
        |out| of its bins, from 256 sums in float64 of every 256th, which are added up by halves.

        Returns how many are chosen; None if not every entry of `out` is sound.
        """

    @abstractmethod
    def pack_bins(
        self, x: Array, bins: Bins, marks: Array, counts: Array, scales: Array, words: Array
    ) -> None:
        """Write the code of the chosen entries of `x`: T[n], as above, to `words`.

        They travel as their sign times the scale of the segment, which is subtracted from `x` there.
        """

    @abstractmethod
    def merge_bins(self, messages: Messages, bins: Bins, divisor: int, out: Array) -> int:
        """Write the sum of the messages of code, added in rank order from 0, over `divisor` to `out`: T[n].

        Entries that no message holds are zero. Returns how many entries some message holds. Raises
        `ExchangeError`, and writes nothing, if a bin has too many entries, or they are out of order or
        range, or do not fill the message.
        """

    @abstractmethod
    def quantize(
        self,
        gradient: Array,
        levels: Array,
        bucket: int,
        largest: bool,
        key: int,
        codes: Array,
        scales: Array,
    ) -> bool:
        """Round a gradient at random to levels of magnitude: without bias, and reproducibly.

        Entry i, of the bucket i // `bucket`, has the ratio r = |x[i]| / scale, a float32 (the quotient is
        of T). Among the `levels` l, a float32[2 ** (bits - 1)] ascending from 0 to 1, its code is q, the
        number of j >= 1 for which r >= l[j] or r > l[j - 1] + u * (l[j] - l[j - 1]), in float32: the level
        below, or the one above with a probability that makes the mean of l[q] equal to r. u is
        mix(mix(i ^ low) ^ high) >> 8 in units of 2**-24, with the halves of `key`, 64 bits, and `mix` of
        `hashing.mix32`. Where the scale is 0, all q are 0.

        `scales`: T[buckets] receives the largest magnitude of each bucket, if `largest`, or else its 2-norm,
        which is at least that and at most the largest finite number: squares are added up in float64, in
        32 sums of every 32nd entry, and those by halves.

        `codes`: uint32[bits * ceil(n / 32)] receives bit b of (2 q + sign), of entry 32 g + i, as bit i of
        word bits * g + b. `bucket` is a multiple of 32, so that no group of 32 is of two buckets.

        Returns whether every entry is sound. If not, `codes` and `scales` are unspecified.
        """

    @abstractmethod
    def merge_codes(
        self, messages: Messages, levels: Array | None, bits: int, bucket: int, divisor: int, out: Array
    ) -> None:
        """Decode messages, add them in rank order from 0, and write the sum over `divisor` to `out`: T[n].

        A message is words, as indices alone: those of the scales, of its own levels if `levels` is None, and
        of the codes; others may follow.
        """

    def to_elias(self, codes: Array, bits: int, size: int, bucket: int, out: Array) -> int:  # noqa: ARG002
        """Write the codes of `quantize` in less, where most are 0; return how many words of `out` that took.

        For each bucket the number of its bits and that of its levels above 0, two words; and then the bits
        of each bucket, the first the highest of a word, filled up to whole words. They are, for each level
        q above 0: omega(gap), the sign, omega(q), where the gap is the distance from the one before, and
        omega Elias's recursive code. `out` has room for 15 words for every 32 entries, and 2 for each bucket.

        Raises `ConfigError` on a device that does not have it.
        """
        raise ConfigError(f"coding is 'elias', which device={self.name!r} does not have: give 'fixed'")

    def from_elias(self, words: Array, bits: int, size: int, bucket: int, codes: Array) -> bool:  # noqa: ARG002
        """Undo `to_elias`; return whether the words are what that could have written."""
        raise ConfigError(f"coding is 'elias', which device={self.name!r} does not have: give 'fixed'")

    @abstractmethod
    def count_ratios(self, gradient: Array, bucket: int, largest: bool) -> Array:
        """Return how many entries have which ratio r, as `quantize` defines it: int64[194], in host memory.

        Bin i, from 1 to 191, begins with (1 + i % 8 / 8) * 2**(i // 8 - 24); bin 0 holds what is less, bin
        192 what is exactly 1, and bin 193 what is not finite. Buckets with a scale of 0 are left out.
        """

    @abstractmethod
    def encode_lines(self, gradient: Array, residual: Array, out: Array, lines: Lines, words: Array) -> bool:
        """Write residual + gradient to `out`: T[n], its blocks as code to `words`: uint32[lines.words].

        The branch of a block is the first with the largest |product| of block and representative, its line
        the first in the branch with the largest |product| of block and vector. Products are summed in T
        from 0 in the order of entries. The coefficient is the second product, in steps of scale /
        `lines.most`: to nearest, ties to even, of (product / scale) `lines.most`, where the scale is the
        largest |product| of the group. What the code stands for, coefficient x step x vector, is subtracted
        from `out`.

        Returns whether every entry of residual + gradient is sound. If not, `out`
        and `words` are unspecified.
        """

    @abstractmethod
    def merge_lines(self, messages: Messages, lines: Lines, divisor: int, out: Array) -> None:
        """Write the sum of the codes of all ranks, added in rank order from 0, over `divisor` to `out`."""
