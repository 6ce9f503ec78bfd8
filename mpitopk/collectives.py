"""What a scheme may ask of the other ranks: it yields one of these and is sent the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from mpitopk.typing import Array
    from mpitopk.wire import Message


@dataclass(frozen=True, eq=False)
class Allgatherv:
    """Gather the messages of all ranks; the result is `wire.Messages`, in rank order.

    Attributes
    ----------
    message : Message
        This rank's message; the driver writes its header.
    fixed : bool
        Whether every rank knows the sizes of all messages. If not, they are exchanged first.
    sizes : list of int, optional
        The sizes of all messages, in bytes; by default as that of this rank's.
    finite : bool
        False if this rank's entries are not to be used because some are NaN or Inf. Every rank
        then learns of it from the header and the step is abandoned.
    """

    message: Message
    fixed: bool = True
    finite: bool = True
    sizes: list[int] | None = None

    @property
    def sent(self) -> Array:
        """What this rank contributes."""
        return self.message.buffer

    @property
    def nbytes(self) -> int:
        """Bytes that this rank contributes."""
        return self.message.buffer.size


@dataclass(frozen=True, eq=False)
class Allreduce:
    """Average an array over the ranks; the result is `mean`: `values` itself, or apart from it.

    The result is checked: if an entry is not finite, every rank sees it and the step is abandoned.

    Attributes
    ----------
    values, mean : arrays of the accumulator's type, of one length
    fixed, finite : bool
        As for `Allgatherv`.
    """

    values: Array
    mean: Array
    fixed: bool = True
    finite: bool = True

    sizes: ClassVar[None] = None
    """All ranks contribute as much."""

    @property
    def sent(self) -> Array:
        """What this rank contributes."""
        return self.values

    @property
    def nbytes(self) -> int:
        """Bytes that this rank contributes."""
        return self.values.nbytes


@dataclass(frozen=True, eq=False)
class Butterfly:
    """Merge the messages of all ranks, two at a time, in rounds (`mpitopk.butterfly`).

    All messages, merged ones too, are of one size. The result is `wire.Messages`, of a single
    message that is the same on every rank; valid until the next exchange.

    Attributes
    ----------
    message : Message
        This rank's message; only its header is changed.
    merge : callable
        Takes a message that this rank holds, one that has arrived, and whether this rank, alone of
        those that merge the same two, is to keep what the merged one lacks. Returns the merged
        message; None if one of its values is too large. It must not depend on which of both is held.
    fixed, finite : bool
        As for `Allgatherv`.
    """

    message: Message
    merge: Callable[[Message, Message, bool], Message | None]
    fixed: bool = True
    finite: bool = True

    sizes: ClassVar[None] = None
    """All ranks contribute as much."""

    @property
    def sent(self) -> Array:
        """What this rank contributes."""
        return self.message.buffer

    @property
    def nbytes(self) -> int:
        """Bytes that this rank contributes."""
        return self.message.buffer.size


Collective: TypeAlias = Allgatherv | Allreduce | Butterfly
