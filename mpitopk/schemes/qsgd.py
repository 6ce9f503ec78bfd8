"""QSGD: entries rounded at random to equidistant levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.collectives import Allgatherv
from mpitopk.errors import ConfigError, ExchangeError, nearest
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.quantizer import Codes, Quantizer
from mpitopk.wire import HEADER, Message, Messages, message_bytes

if TYPE_CHECKING:
    from mpitopk.typing import Array


CODINGS = ("fixed", "elias")


def uniform_levels(top: int) -> Array:
    """Return 0, 1 / top, ... 1."""
    levels: Array = np.arange(top + 1, dtype=np.float32) / np.float32(top)
    return levels


class _Uniform(Codes):
    def __init__(self, rank: Rank, scheme: QSGD) -> None:
        super().__init__(rank, scheme, levels=0)
        self.levels = rank.device.from_host(uniform_levels(scheme.top))

    def outgoing(self) -> Message:
        """Return the message that is sent."""
        return self.message

    def incoming(self, messages: Messages) -> Messages:
        """Return received messages in fixed width."""
        return messages


class _Elias(_Uniform):
    """Codes in fixed width on either side, and in Elias's code between."""

    def __init__(self, rank: Rank, scheme: QSGD) -> None:
        super().__init__(rank, scheme)
        size, device, self._scheme = rank.layout.size, rank.device, scheme
        most = self.message.indices.size - self.codes.size + 2 * self.scales.size + 15 * -(-size // 32)
        self._room = device.empty(message_bytes(most, 0, 0), "uint8")
        nbytes = self.message.buffer.size
        self._received = device.empty(rank.size * nbytes, "uint8")
        self._parts = [self._received[p * nbytes : (p + 1) * nbytes] for p in range(rank.size)]
        self._front = self.message.indices.size - self.codes.size

    def outgoing(self) -> Message:
        bits, bucket, front = self._scheme.bits, self._scheme.bucket, self._front
        layout, words = self._rank.layout, self._room[HEADER.size :].view("uint32")
        used = self._rank.device.to_elias(self.codes, bits, layout.size, bucket, words[front:])
        words[:front] = self.message.indices[:front]
        count = front + used
        words[count : count + 1] = 0  # the padding
        return Message.begun(self._room[: message_bytes(count, 0, 0)], count, layout.digest)

    def incoming(self, messages: Messages) -> Messages:
        bits, bucket, front = self._scheme.bits, self._scheme.bucket, self._front
        for rank, (words, part) in enumerate(zip(messages.lists(), self._parts, strict=True)):
            message = Message.begun(part, self.message.indices.size, self._rank.layout.digest)
            message.indices[:front] = words[:front] if words.size >= front else 0
            codes, size = message.indices[front:], self._rank.layout.size
            if not self._rank.device.from_elias(words[front:], bits, size, bucket, codes):
                raise ExchangeError(
                    f"the message of rank {rank} has codes that do not fill its buckets: it was damaged on "
                    "the way, or its sender has a defect"
                )
        nbytes = self.message.buffer.size
        starts = list(range(0, len(self._parts) * nbytes, nbytes))
        return Messages(self._received, starts, [nbytes] * len(self._parts))


@dataclass(frozen=True)
class QSGD(Quantizer):
    """Round every entry at random to one of s = 2**(bits - 1) - 1 equidistant levels, or 0.

    Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS
    2017, section 3.1; with the largest magnitude as scale, as in its experiments. The sign is one of the
    bits: 4 bits are 7 levels. It needs no change of the learning rate.

    Parameters
    ----------
    bits, bucket, norm, seed
        See `Quantizer`. 4 or 8 bits with buckets of 512, and 2 bits with 128, are those of the paper.
    coding : {"fixed", "elias"}
        How levels travel: in bits of a fixed number, or with Elias's code of the gaps between those above
        0, of signs and of levels (section 3.1): less, where norm is "l2" and most levels are 0. Not on a GPU.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    A rank sends bits n / 8 + 4 n / bucket bytes, and receives that of every other rank: more than a dense
    ring allreduce moves on more than about 64 / bits ranks. With Elias's code a rank sends 4 + 8 bytes a
    bucket and as many bits as it takes, at most 15 n; 2.8 n for s = sqrt(bucket) and norm "l2". It then
    holds the messages of all ranks in fixed width too.

    Examples
    --------
    >>> QSGD(bits=4).top
    7
    """

    about = About("Alistarh et al. 2017", "bits n / 32 words, n / bucket scales", "allgatherv", "n")

    coding: str = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coding not in CODINGS:
            raise ConfigError(f"coding is {self.coding!r}: {nearest(str(self.coding), CODINGS)}")

    def init(self, rank: Rank) -> _Uniform:
        if self.coding == "fixed":
            return _Uniform(rank, self)
        none = rank.device.empty(0, "uint32")
        rank.device.to_elias(none, self.bits, 0, self.bucket, none)  # refused where there is no such thing
        return _Elias(rank, self)

    def stand_in(self, state: Codes) -> Allgatherv | None:
        return super().stand_in(state) if self.coding == "fixed" else None

    def step(self, rank: Rank, state: _Uniform, gradient: Array, sparse: bool) -> Steps:
        finite = self.encode(rank, state, gradient, state.levels)
        message = state.outgoing() if finite else state.message
        messages = yield Allgatherv(message, self.coding == "fixed", finite)
        messages = state.incoming(messages)
        rank.device.merge_codes(messages, state.levels, self.bits, self.bucket, rank.size, state.mean)
        return state.result(sparse=sparse)
