"""What travels: a fixed header, indices, values. Little-endian, one contiguous buffer per rank.

=======  ====================================================================================
bytes    field
=======  ====================================================================================
0-3      magic ``mTk1``
4        status: 0 fine, 1 the accumulated gradient is not finite, 2 the rank has failed,
         3 merging has failed on a rank
5        size of a value in bytes; 0 in a message of indices alone
6-7      zero
8-15     step
16-23    count: entries sent with an index
24-31    digest of the layout
32-39    when this rank came to the exchange, in ns of the clock that all ranks share
40-      indices, uint32, ascending, padded to 8 bytes
...      values: those of the indices, then those of the dense pieces; padded to 8 bytes
=======  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpitopk.errors import ExchangeError

if TYPE_CHECKING:
    from mpitopk.typing import Array

MAGIC = int.from_bytes(b"mTk1", "little")
HEADER = Struct("<IBBHqqQq")
STEP, COUNT, ARRIVAL = 1, 2, 4  # which word
STATUS_AT = 4  # which byte

Heads: TypeAlias = tuple[memoryview, list[int]]


class Status(IntEnum):
    """How a rank comes to the exchange."""

    FINE = 0
    NONFINITE = 1
    FAILED = 2
    LOST = 3


@dataclass(frozen=True)
class Header:
    """The fields of a header, in their order."""

    magic: int
    status: int
    itemsize: int
    reserved: int
    step: int
    count: int
    layout: int
    arrival: int


def _padded(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def message_bytes(count: int, dense: int, itemsize: int) -> int:
    """Return the size of a message with `count` indexed and `dense` further values."""
    return HEADER.size + _padded(4 * count) + _padded(itemsize * (count + dense))


@dataclass(frozen=True, eq=False)
class Message:
    """One rank's message.

    Attributes
    ----------
    buffer : uint8 array
        The whole message.
    indices : uint32 array, shape (count,)
    values : array of the wire's type, shape (count + dense,)
    head : memoryview
        The header, in host memory: the first bytes of the buffer, if it is there.
    dense : int
        How many values have no index.
    itemsize : int
        Bytes of a value; 0 in a message of indices alone.
    """

    buffer: Array
    indices: Array
    values: Array
    head: memoryview
    dense: int
    itemsize: int

    @classmethod
    def parse(cls, buffer: Array, count: int, dense: int, dtype: str | None) -> Message:
        """Return views into a buffer that begins with a message; without a dtype it has no values."""
        on_host = isinstance(buffer, np.ndarray)
        head = memoryview(buffer[: HEADER.size] if on_host else bytearray(HEADER.size))  # type: ignore[arg-type]
        itemsize = np.dtype(dtype).itemsize if dtype else 0
        at = HEADER.size
        to = at + _padded(4 * count)
        return cls(
            buffer[: message_bytes(count, dense, itemsize)],
            buffer[at : at + 4 * count].view("<u4"),
            buffer[to : to + itemsize * (count + dense)].view(dtype or "uint8"),
            head,
            dense,
            itemsize,
        )

    @classmethod
    def blank(cls, buffer: Array, count: int, dense: int, dtype: str | None, layout: int = 0) -> Message:
        """Return a message of zeros in the given buffer, its header begun; `layout`: its digest."""
        buffer.fill(0)
        return cls.begun(buffer, count, layout, dense, dtype)

    @classmethod
    def begun(
        cls, buffer: Array, count: int, layout: int, dense: int = 0, dtype: str | None = None
    ) -> Message:
        """Return what is in the given buffer as a message, its header begun."""
        message = cls.parse(buffer, count, dense, dtype)
        HEADER.pack_into(message.head, 0, MAGIC, Status.FINE, message.itemsize, 0, 0, count, layout, 0)
        return message

    def sign(self, status: Status, step: int, arrival: int) -> None:
        """Write to the header what changes from step to step."""
        words = self.words
        words[STEP], words[ARRIVAL] = step, arrival
        self.head[STATUS_AT] = status

    @cached_property
    def words(self) -> memoryview:
        """The header, in signed words of 8 bytes."""
        return self.head.cast("q")

    @property
    def alone(self) -> Messages:
        """The messages of a group that has this one only."""
        return Messages(self.buffer, [0], [self.buffer.size], (self.words, [0]))


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of all ranks, in rank order, in one buffer.

    Attributes
    ----------
    buffer : uint8 array
    starts : list of int
        Where each message begins, in bytes; multiples of 8.
    sizes : list of int
        Bytes of each message.
    heads : (memoryview of signed words of 8 bytes, list of int), optional
        Host memory with the headers, and at which word each begins, if the buffer is elsewhere.
    """

    buffer: Array
    starts: list[int]
    sizes: list[int]
    heads: Heads | None = None

    @cached_property
    def equal(self) -> bool:
        """Whether all are of one size."""
        return len(set(self.sizes)) == 1

    @cached_property
    def words(self) -> Heads:
        """Signed words of 8 bytes in host memory, and at which of them each header begins."""
        return self.heads or (self.buffer.data.cast("q"), [start >> 3 for start in self.starts])

    @property
    def each(self) -> Iterator[Messages]:
        """Yield every message by itself."""
        words, begins = self.words
        for start, size, begin in zip(self.starts, self.sizes, begins, strict=True):
            yield Messages(self.buffer[start : start + size], [0], [size], (words, [begin]))

    @property
    def headers(self) -> list[Header]:
        """The headers of all ranks."""
        words, begins = self.words
        return [Header(*HEADER.unpack_from(words, 8 * at)) for at in begins]

    @property
    def latest(self) -> int:
        """When the last rank came to the exchange."""
        words, begins = self.words
        return max([words[at + ARRIVAL] for at in begins])

    @property
    def worst(self) -> int:
        """The worst status of all ranks."""
        words, begins = self.words
        return max([words[at] >> 32 & 0xFF for at in begins])

    @property
    def counts(self) -> list[int]:
        """Entries with an index, of each message."""
        words, begins = self.words
        return [words[at + COUNT] for at in begins]

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.headers[0].itemsize

    def all_fine(self, own: Message, first: int = 0) -> bool:
        """Return whether all ranks can go on; the first message is of rank `first`.

        Raises the same `ExchangeError` on all of them where a message is foreign, out of step or of
        another form than the first, or than ours if there is one only.
        """
        if self.equal and self._like(own):
            return own.head[STATUS_AT] == Status.FINE
        headers = self.headers
        right = headers[0] if len(headers) > 1 else Header(*HEADER.unpack(own.head))
        for i, header in enumerate(headers):
            self._check(first + i, self.sizes[i], header, right, own.dense)
        return all(header.status == Status.FINE for header in headers)

    def _like(self, own: Message) -> bool:
        """Return whether all headers are the own one, but for the arrival."""
        (words, begins), mine = self.words, own.words[:ARRIVAL]
        return all(words[at : at + ARRIVAL] == mine for at in begins)

    @staticmethod
    def _check(rank: int, size: int, header: Header, right: Header, dense: int) -> None:
        expected = {"magic": MAGIC, "layout": right.layout, "step": right.step, "itemsize": right.itemsize}
        for name, value in expected.items():
            if getattr(header, name) != value:
                raise ExchangeError(
                    f"the message of rank {rank} has {name} {getattr(header, name)}, expected {value}: "
                    "every rank must call allreduce equally often, on runtimes made together"
                )
        if header.count < 0 or message_bytes(header.count, dense, header.itemsize) != size:
            raise ExchangeError(
                f"the message of rank {rank} has {size} bytes, which {header.count} indexed and "
                f"{dense} further values do not fill: it was damaged on the way, or its sender has a defect"
            )

    def parts(self, dense: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the indices and values of each message; `dense`: rows (start, stop)."""
        further = int((dense[:, 1] - dense[:, 0]).sum())
        dtype = f"f{self.itemsize}"
        for start, count in zip(self.starts, self.counts, strict=True):
            message = Message.parse(self.buffer[start:], count, further, dtype)
            yield message.indices, message.values

    def lists(self) -> Iterator[Array]:
        """Yield the indices of each message, where they are alone."""
        for start, count in zip(self.starts, self.counts, strict=True):
            yield Message.parse(self.buffer[start:], count, 0, None).indices

    def intact(self, held: int, size: int) -> int:
        """Return the result of a compiled merge, or raise what its negative values stand for."""
        if held < 0:
            raise corrupt(-1 - held, size)
        return held


def misplaced() -> ExchangeError:
    """Return the error for a message of a plan whose indices cannot be right."""
    return ExchangeError(
        "the message of another rank has indices that are not ascending, or not as many in each segment as "
        "expected: it was damaged on the way, or its sender has a defect; the residual is as before the step"
    )


def corrupt(rank: int, size: int) -> ExchangeError:
    """Return the error for a message whose indices cannot be right."""
    return damaged(rank, f"indices that are not ascending or not below {size}")


def damaged(rank: int, what: str) -> ExchangeError:
    """Return the error for a message that has what cannot be right."""
    return ExchangeError(
        f"the message of rank {rank} has {what}: "
        "it was damaged on the way, or its sender has a defect; the residual is as before the step"
    )
