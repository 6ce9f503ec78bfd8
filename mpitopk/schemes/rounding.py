"""A quantiser on top of a sparsifier: what is selected travels as levels, and what they miss is kept."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.schemes.qsgd import QSGD, uniform_levels
from mpitopk.wire import Message, Messages, damaged, message_bytes

if TYPE_CHECKING:
    from mpitopk.schemes.base import Rank
    from mpitopk.schemes.sparsifier import Memory
    from mpitopk.typing import Array


class Rounding:
    """Messages of words alone: scales and codes of all values, those without an index last; the indices.

    They are made from the message that the sparsifier has packed, whose values are exact, and are made into
    such messages again where they are received.
    """

    def __init__(self, rank: Rank, quantizer: QSGD, memory: Memory) -> None:
        self._rank, self._quantizer, self._memory = rank, quantizer, memory
        self._dtype = rank.layout.accumulator
        self._levels = rank.device.from_host(uniform_levels(quantizer.top))
        self._none = rank.device.empty(0, "uint32")
        self._packed: Message | None = None
        self._dense_of: Array | None = None
        self.message: Message

    def fit(self) -> Message:
        """Return the message to send, of the size of the one that is packed; nothing happens if it has it."""
        packed, memory, device = self._memory.message, self._memory, self._rank.device
        if packed is self._packed:
            return self.message
        count, dense = memory.indices.size, memory.plan.dense
        words = self._words_for(count)
        room = memory.grown("rounded", message_bytes(words, 0, 0))
        self.message = Message.blank(room, words, 0, None, self._rank.layout.digest)
        scales, codes = self._quantizer.words(count + packed.dense, self._dtype)
        self.scales = self.message.indices[:scales].view(self._dtype)
        self.codes = self.message.indices[scales : scales + codes]
        self._decoded = memory.grown("decoded", packed.values.nbytes).view(self._dtype)
        memory.grown("received", self._rank.size * packed.buffer.size)
        if packed.dense and self._dense_of is not dense:
            whole = [np.arange(start, stop, dtype=np.uint32) for start, stop in dense.tolist()]
            self._dense, self._dense_of = device.from_host(np.concatenate(whole)), dense
        self._packed = packed
        return self.message

    def encode(self) -> None:
        """Round the packed values into the message, and add what that loses to where they were taken from."""
        rank, how, memory, packed = self._rank, self._quantizer, self._memory, self._memory.message
        device, count = rank.device, memory.indices.size
        if not packed.values.size:
            return
        how.encode(rank, self, packed.values, self._levels)
        self.message.indices[self.message.indices.size - count :] = packed.indices
        lost = self._decoded
        device.merge_codes(self.message.alone, self._levels, how.bits, how.bucket, 1, lost)
        device.accumulate(lost, packed.values, lost, scale=-1)
        device.put_back(memory.spare, packed.indices, lost[:count], self._none, among=False)
        if packed.dense:
            device.put_back(memory.spare, self._dense, lost[count:], self._none, among=False)

    def decode(self, messages: Messages) -> Messages:
        """Return messages with values; raise `ExchangeError` for one that no number of entries explains."""
        rank, how, packed = self._rank, self._quantizer, self._memory.message
        known = {self.message.indices.size: packed.indices.size}
        counts = [known.get(words) or self._entries(p, words) for p, words in enumerate(messages.counts)]
        dense, itemsize, dtype = packed.dense, packed.itemsize, self._dtype
        sizes = [message_bytes(count, dense, itemsize) for count in counts]
        starts = np.append(0, np.cumsum(sizes)).tolist()
        room = self._memory.grown("received", starts.pop())
        heads = bytearray()
        for one, count, start in zip(messages.each, counts, starts, strict=True):
            part = Message.begun(room[start:], count, rank.layout.digest, dense, dtype)
            heads += part.head
            if part.values.size:
                rank.device.merge_codes(one, self._levels, how.bits, how.bucket, 1, part.values)
                (words,) = one.lists()
                part.indices[:] = words[words.size - count :]
        return Messages(room, starts, sizes, (memoryview(heads).cast("q"), list(range(0, 5 * len(sizes), 5))))

    def _words_for(self, count: int) -> int:
        """Return how many words a message with `count` indices has."""
        return sum(self._quantizer.words(count + self._memory.message.dense, self._dtype)) + count

    def _entries(self, rank: int, words: int) -> int:
        """Return how many indices a message of so many words has."""
        count = bisect_left(range(self._rank.layout.size + 1), words, key=self._words_for)
        if count > self._rank.layout.size or self._words_for(count) != words:
            raise damaged(rank, f"{words} words, which no number of entries takes")
        return count
