"""What a scheme may ask of the other ranks: it yields one of these and is sent the result."""

from __future__ import annotations

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
    def nbytes(self) -> int:
        """Bytes that this rank contributes."""
        return self.values.nbytes


Collective: TypeAlias = Allgatherv | Allreduce
