"""The operations that every device offers; the schemes are written in these and nothing else.

Arrays are one-dimensional and contiguous. *T* is the accumulator's type: float64 where the gradient
is float64, else float32. A gradient is float32, float64, float16 or uint16 (the bits of bfloat16).

The order of magnitudes is the order of the bit patterns without the sign: Inf is above every finite
number, NaN above Inf, and -0 equals +0. Winners are the first k by (magnitude descending, index
ascending). Every operation gives the same bits on every device and for any number of threads.

What is accumulated counts as *sound* while every entry is below `TOO_LARGE`, 2**-32 of what overflows, so
that sums over the ranks stay finite. NaN and Inf are not sound.
"""

from __future__ import annotations

from abc import abstractmethod
from math import hypot, inf, sqrt
from typing import TYPE_CHECKING

from mpitopk.device.codes import Codes

if TYPE_CHECKING:
    from mpitopk.layout import Layout
    from mpitopk.plan import Plan
    from mpitopk.typing import Array, Bytes
    from mpitopk.wire import Heads, Message, Messages

TOO_LARGE = {"float32": 2.0**96, "float64": 2.0**992}


class Device(Codes):
    """Where the gradient lives."""

    name: str
    on_host: bool
    """Whether its arrays are NumPy's."""

    @property
    def fallbacks(self) -> int:
        """How many selections could not use their window and took the slow path."""
        return 0

    @abstractmethod
    def empty(self, size: int, dtype: str) -> Array:
        """Return an uninitialised buffer."""

    @abstractmethod
    def zeros(self, size: int, dtype: str) -> Array:
        """Return a buffer of zeros."""

    @abstractmethod
    def gradient(self, x: object, layout: Layout, *, writable: bool) -> Array:
        """Return what a user gives as gradient as an array of this device that shares its memory.

        Raises `GradientError` where that cannot be, or where it does not fit the layout.
        """

    @abstractmethod
    def overlap(self, x: Array, y: Array) -> bool:
        """Return whether two arrays have memory in common."""

    @abstractmethod
    def from_host(self, x: Array) -> Array:
        """Return an array of this device with the contents of one in host memory."""

    @abstractmethod
    def mirror(self, x: object, what: str) -> Array:
        """Return any array as one in host memory: itself, or a copy where it is not there."""

    @abstractmethod
    def restore(self, x: object, mirror: Array) -> None:
        """Write what was changed in the mirror of an array back to it."""

    @abstractmethod
    def exchange_memory(self, nbytes: int) -> Bytes:
        """Return a buffer that MPI can read and write; raise `MemoryError` if there is no memory for it."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all work on arrays of this device is done, so that MPI may read and write them."""

    @abstractmethod
    def staged(self, x: Array, head: memoryview | None = None) -> Array:
        """Return an array as one that MPI can read once work has settled: itself, or a copy.

        A copy begins with the bytes of `head`. It is valid until the next call.
        """

    @abstractmethod
    def unstaged(self, x: Array, out: Array | None = None) -> Array:
        """Return what MPI has written as an array of this device, in `out` if one is given.

        Without `out` it is valid until the next such call.
        """

    def heads(self, messages: Messages) -> Heads:
        """Return the headers of messages in host memory; only a device asks that MPI writes to directly."""
        return messages.words

    @abstractmethod
    def finite(self, x: Array) -> bool:
        """Return whether every entry is finite."""

    @abstractmethod
    def zero_nonfinite(self, x: Array) -> int:
        """Set the entries that are NaN or Inf to zero, in place; return how many there were."""

    @abstractmethod
    def norm(self, x: Array) -> float:
        """Return the 2-norm of a gradient, added up in float64 in a fixed order."""

    @abstractmethod
    def accumulate(
        self, gradient: Array, residual: Array | None, out: Array, *, scale: float = 1, keep: float = 1
    ) -> bool:
        """Write keep * residual + scale * gradient (or scale * gradient) to `out`: T[n].

        Both products are rounded to T, and then the sum. `out` may be one of the two arrays.
        Returns whether every entry written is sound.
        """

    def accumulate_norm(self, gradient: Array, residual: Array, out: Array, plan: Plan) -> float | None:
        """Write residual + gradient to `out`: T[n]; return the norm of what is selected from.

        The norms of sparse pieces are put together by `math.hypot`. None if not every entry is sound.
        """
        kind = type(self)  # whose operations are not timed by themselves
        if not kind.accumulate(self, gradient, residual, out):
            return None
        return hypot(*(kind.norm(self, out[start:stop]) for start, stop in plan.sparse.tolist()))

    @abstractmethod
    def accumulate_select(
        self, gradient: Array, residual: Array, out: Array, plan: Plan, indices: Array, values: Array
    ) -> bool:
        """Write residual + gradient to `out`, move the winners from there to `values`.

        `indices`: uint32[plan.total] and `values`: T[plan.total] receive the winners, ascending by
        index; `out`: T[n] is zero at the winners. Dense pieces are accumulated and left in `out`.

        Returns whether every accumulated entry is sound. If not, `out`, `indices` and `values` are
        unspecified.
        """

    @abstractmethod
    def select(self, x: Array, plan: Plan, indices: Array, values: Array) -> bool:
        """Copy the winners of `x`: T[n] to `indices` and `values`, as above, and leave `x` alone."""

    @abstractmethod
    def move_above(
        self, x: Array, plan: Plan, threshold: float, least: int, indices: Array, values: Array
    ) -> int:
        """Return how many entries of the groups of `x`: T[n] have at least a magnitude; maybe move them.

        If they are `least` to `indices.size`, they are moved to the front of `indices`: uint32[most] and
        `values`: T[most], ascending by index, and `x` is zero there. If they are fewer or more, `x` is as
        before, and `indices` and `values` are unspecified. `threshold`, from 0 on, is rounded to T.
        Every entry of `x` is finite. One pass over `x`; what is found is looked at once more.
        """

    def search_above(
        self,
        x: Array,
        plan: Plan,
        threshold: float,
        least: int,
        rounds: int,
        indices: Array,
        values: Array,
    ) -> int:
        """Move as `move_above` from the first of several thresholds that it can be done with.

        The first is the one given; the next is half of the least that was too high, or 1.5 times the
        largest that was too low, or, once there are both, their geometric mean. Returns how many entries
        were moved, at least one; 0 if none of so many `rounds` will do.
        """
        low, high = 0.0, inf
        for _ in range(rounds):
            count = type(self).move_above(self, x, plan, threshold, least, indices, values)
            if least <= count <= indices.size:
                return count
            low, high = (threshold, high) if count > indices.size else (low, threshold)
            further = high / 2 if low == 0 else 1.5 * low
            threshold = low * sqrt(high / low) if low > 0 and high < inf else further
        return 0

    @abstractmethod
    def chunk_maxima(self, x: Array, plan: Plan, chunk: int, indices: Array) -> None:
        """Write where the largest magnitude of every `chunk` consecutive entries of a group is.

        `x`: T[n], `indices`: uint32[plan.total], ascending; `plan.counts[g]` is the size of the group over
        `chunk`, rounded up, so that the last chunk of a group may be shorter. The first of equal ones wins.
        """

    @abstractmethod
    def sample(self, x: Array, plan: Plan, key: int, out: Array) -> None:
        """Copy entries of the only group of `plan` at random: `x`: T[n] to `out`: T[m].

        Of N entries, number i of the sample is that at position floor((i + u_i) N / m): one out of each of
        m equal parts, every entry with probability m / N, independent of the other parts. 2**31 u_i are
        the upper 31 bits of splitmix64(key + i), so that equal keys give equal samples on all devices.
        """

    @abstractmethod
    def random_indices(self, plan: Plan, key: int, out: Array) -> None:
        """Draw `plan.counts[g]` distinct indices from each group; write them ascending to `out`.

        A keyed permutation of the group's positions (a balanced Feistel network with cycle walking)
        is applied to 0, 1, ... counts[g] - 1, so that equal keys give equal indices on all ranks,
        devices and versions, and no memory of the size of the group is needed.
        """

    @abstractmethod
    def take(self, x: Array, indices: Array, values: Array, *, clear: bool) -> None:
        """Copy `x[indices]` to `values`, converted; with `clear`, set `x` to zero there."""

    @abstractmethod
    def pack(self, x: Array, plan: Plan, indices: Array, values: Array, message: Message) -> None:
        """Write the selected entries and the dense pieces of `x`: T[n] to the message.

        `x` is zero at the indices: their values have been moved out. Values are rounded to the
        message's type (to nearest, clamped to its finite range), and `x` is left with what the message
        does not carry: the rounding error, at the indices and in the dense pieces; zero where nothing
        is rounded. `values` is scratch afterwards.
        """

    @abstractmethod
    def merge(self, messages: Messages, dense: Array, divisor: int, out: Array) -> int:
        """Write the sum of the messages, added in rank order from 0, over `divisor` to `out`: T[n].

        `dense`: rows (start, stop). Entries that no message holds are zero. Returns how many
        entries some message holds. Raises `ExchangeError` if an index is out of order or range.
        """

    @abstractmethod
    def merge_sparse(
        self, messages: Messages, dense: Array, divisor: int, size: int, dtype: str
    ) -> tuple[Array, Array]:
        """Return the entries that `merge` would have written: ascending uint32[m] and T[m].

        The arrays belong to the device and are valid until its next merge.
        """

    @abstractmethod
    def nonzero(self, x: Array) -> tuple[Array, Array]:
        """Return the entries of `x`: T[n] that are not zero: ascending uint32[m] and T[m].

        The arrays belong to the device and are valid until its next call of this.
        """

    @abstractmethod
    def reserve(self, plan: Plan) -> None:
        """Make room for what `combine` needs with this plan, so that it cannot fail for want of it."""

    @abstractmethod
    def combine(
        self, mine: Message, theirs: Message, plan: Plan, out: Message, indices: Array, values: Array
    ) -> bool:
        """Add two messages of a plan, both in T, and write the sum's winners to `out`.

        Where both hold an index their values are added, others stay as they are; of each group of the
        plan the first `counts[g]` by (magnitude descending, index ascending) win. Dense values are added.
        `out` may be `mine`. Exchanging `mine` and `theirs` gives the same bits.

        `indices`: uint32[plan.total] and `values`: T[plan.total] receive what has not won, group by
        group, ascending; `plan.NOWHERE` and zero fill the places of a group that are left.

        Returns whether every sum is sound. If not, all that was written is unspecified. Raises
        `ExchangeError` if the indices of `theirs` are not ascending, or not as many in each group as the
        plan says.
        """

    @abstractmethod
    def put_back(self, x: Array, indices: Array, values: Array, winners: Array, *, among: bool) -> None:
        """Add values to `x`: T[n] at those indices that are (or with `among` False are not) winners.

        Indices, but for `plan.NOWHERE`, which is passed over, and `winners` are uint32 and ascending.
        """

    @abstractmethod
    def divide(self, x: Array, divisor: int) -> bool:
        """Divide by `divisor` in place; return whether every entry is finite."""
