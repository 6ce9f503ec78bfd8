"""The exchange over MPI: the only module that imports mpi4py.

Counts, displacements and totals of every MPI call stay within `limit` bytes, since MPI libraries
compute with 32-bit products of them; larger exchanges go in rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ConfigError, ExchangeError
from mpitopk.wire import Messages

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitopk.device.base import Device
    from mpitopk.typing import Array, Bytes
    from mpitopk.wire import Message

LIMIT = 1 << 30
FAILED = -1
PINGS = 16
CUDA_AWARE = "MPITOPK_CUDA_AWARE"
"""The variable of the environment that says whether MPI is given memory of a GPU."""


def rounds(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (offset, counts) such that no round moves more than `limit` bytes in total.

    Round by round, rank p sends `counts[p]` bytes from `offset` on. The limit is at least a byte a rank.
    """
    step = limit // len(sizes)
    for offset in range(0, max(sizes), step):
        yield offset, [min(step, max(0, size - offset)) for size in sizes]


class Transport:
    """A private duplicate of a communicator, and the buffers to receive in.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    limit : int
        Bytes that one MPI call may move in total.
    """

    def __init__(self, comm: MPI.Intracomm, limit: int = LIMIT) -> None:
        if not hasattr(comm, "Allgatherv"):
            raise ConfigError(f"comm is {comm!r}: give an mpi4py communicator, such as MPI.COMM_WORLD")
        from mpi4py import MPI

        self._comm = comm.Dup()
        self.limit = limit
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.serve(ReferenceDevice())

    def serve(self, device: Device) -> None:
        """Exchange what is in the memory of this device, from now on."""
        self._device = device
        self._on_host = device.on_host
        self._settle = device.settle
        self._room = self._staged = device.exchange_memory(0)
        self._received = Messages(self._room, [], [])

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its node."""
        return self._node.Get_rank()

    @property
    def processors(self) -> int:
        """Share of this rank in the processors that those of its node may use."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, usable // self._node.Get_size())

    @contextmanager
    def one_first(self) -> Iterator[None]:
        """Let the first rank of each node go first: the others find what it has left on disk."""
        if self.local_rank > 0:
            self._node.Barrier()
        try:
            yield
        finally:
            if self.local_rank == 0:
                self._node.Barrier()

    def free(self) -> None:
        """Give the communicators back (collective)."""
        self._node.Free()
        self._comm.Free()

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return the (small) objects of all ranks, everywhere."""
        return self._comm.allgather(mine)

    def sizes(self, mine: int) -> list[int]:
        """Return the sizes that all ranks announce; `FAILED` stands for one that cannot go on."""
        every = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine], np.int64), every)
        return [int(size) for size in every]

    def allgatherv(self, message: Message, sizes: list[int]) -> Messages:
        """Gather the messages of all ranks, of the given sizes; valid until the next exchange.

        Where they are of one size it is an allgather, for which MPI libraries have quicker algorithms.
        """
        return self._handed(self.gather_bytes(self._staged_bytes(message), sizes))

    def gather_bytes(self, sent: Bytes, sizes: list[int]) -> Messages:
        """Gather bytes that MPI can read, of the given sizes, to where it can write."""
        if sizes != self._received.sizes:
            self._received = self._room_for(sizes)
        received = self._received
        self._settle()
        if received.buffer.size > self.limit:
            self._allgatherv_in_rounds(sent, received)
        elif received.equal:
            self._comm.Allgather(sent, received.buffer)
        else:
            self._comm.Allgatherv(sent, [received.buffer, (sizes, received.starts)])
        return received

    def _allgatherv_in_rounds(self, sent: Bytes, received: Messages) -> None:
        for offset, counts in rounds(received.sizes, self.limit):
            starts = list(accumulate(counts, initial=0))
            part = sent[offset : offset + counts[self.rank]]
            self._comm.Allgatherv(part, [self._staged[: starts[-1]], (counts, starts[:-1])])
            for start, count, target in zip(starts, counts, received.starts, strict=False):
                at = target + offset
                received.buffer[at : at + count] = self._staged[start : start + count]
            self._settle()

    def _room_for(self, sizes: list[int]) -> Messages:
        """Return where messages arrive. All ranks grow together, so that none fails alone.

        What has grown once grows by half at least, so that sizes that vary soon fit.
        """
        *starts, total = accumulate(sizes, initial=0)
        if total > self._room.size:
            self._grow(max(total, 3 * self._room.size // 2))
        return Messages(self._room[:total], starts, sizes)

    def _grow(self, total: int) -> None:
        failure = None
        try:
            room = self._device.exchange_memory(total)
            staged = self._device.exchange_memory(self.limit if total > self.limit else 0)
        except MemoryError as error:
            failure = f"rank {self.rank} has no memory for {total} bytes of messages: {error}"
        failures = [text for text in self.gather_objects(failure) if text]
        if failures:
            raise ExchangeError("; ".join(failures) + "; lower the density, or run fewer ranks on a node")
        self._room, self._staged = room, staged

    def swap(self, message: Message, to: int | None, source: int | None) -> Messages | None:
        """Send a message to one rank and receive one of its size from another; None: no rank.

        What is received is valid until the next exchange.
        """
        received = self.swap_bytes(self._staged_bytes(message), to, source)
        return None if source is None else self._handed(received)

    def swap_bytes(self, sent: Bytes, to: int | None, source: int | None) -> Messages:
        """Exchange bytes that MPI can read, as `swap`, to where it can write.

        Every rank comes here for each size, since all make room together.
        """
        from mpi4py import MPI

        if self._received.sizes != [sent.size]:
            self._received = self._room_for([sent.size])
        received = self._received
        dest = MPI.PROC_NULL if to is None else to
        other = MPI.PROC_NULL if source is None else source
        self._settle()
        for part in self._parts(sent):
            self._comm.Sendrecv(sent[part], dest, recvbuf=received.buffer[part], source=other)
        return received

    def _staged_bytes(self, message: Message) -> Bytes:
        return message.buffer if self._on_host else self._device.staged(message.buffer, message.head)

    def _handed(self, received: Messages) -> Messages:
        """Return what MPI has written as messages on this device."""
        if self._on_host:
            return received
        device = self._device
        heads = received.words if isinstance(received.buffer, np.ndarray) else device.heads(received)
        return Messages(device.unstaged(received.buffer), received.starts, received.sizes, heads)

    def allreduce(self, values: Array, total: Array) -> None:
        """Write the sum over the ranks to `total`, which may be `values`."""
        from mpi4py import MPI

        sent = self._device.staged(values)
        to = total if sent is values else sent
        self._settle()
        for part in self._parts(sent):
            self._comm.Allreduce(MPI.IN_PLACE if sent is to else sent[part], to[part])
        self._device.unstaged(to, total)

    def broadcast(self, array: Array, root: int) -> None:
        """Copy the root's bytes to all other ranks."""
        flat = array.reshape(-1).view(np.uint8)
        for part in self._parts(flat):
            self._comm.Bcast(flat[part], root)

    def _parts(self, array: Array) -> Iterator[slice]:
        step = max(1, self.limit // array.itemsize)
        return (slice(at, at + step) for at in range(0, array.size, step))

    def latest(self, arrival: int) -> int:
        """Return the largest value of all ranks (and wait for the slowest)."""
        from mpi4py import MPI

        every = np.empty(1, np.int64)
        self._comm.Allreduce(np.array([arrival], np.int64), every, op=MPI.MAX)
        return int(every[0])

    def clock_offset(self, clock: Callable[[], int]) -> int:
        """Return what to add to this rank's clock, in ns, to get that of rank 0.

        One rank of each node bounces messages with rank 0 and takes the quickest exchange, half of
        whose time the answer was on its way (Cristian 1989); the others of a node share its clock.
        """
        leader = self._comm.allgather(self._node.bcast(self.rank))
        offset, mine = 0, np.empty(1, np.int64)
        for other in sorted(set(leader) - {leader[0]}):
            if self.rank == leader[0]:
                for _ in range(PINGS):
                    self._comm.Recv(mine, other)
                    self._comm.Send(np.array([clock()], np.int64), other)
            elif self.rank == other:
                quickest = None
                for _ in range(PINGS):
                    sent = clock()
                    self._comm.Send(mine, leader[0])
                    self._comm.Recv(mine, leader[0])
                    taken = clock() - sent
                    if quickest is None or taken < quickest:
                        quickest, offset = taken, int(mine[0]) - sent - taken // 2
        return int(self._node.bcast(offset))


def abort_on_error() -> None:
    """End the whole job when an exception is not handled on one rank.

    Without it that rank ends alone and the others wait for it for ever. Call it at the start of a
    program; it prints the rank with the traceback and calls `MPI_Abort`.
    """
    import sys
    import threading
    import traceback
    from types import TracebackType

    from mpi4py import MPI

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        rank = MPI.COMM_WORLD.Get_rank()
        sys.stdout.flush()
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = report
    threading.excepthook = lambda args: report(args.exc_type, args.exc_value, args.exc_traceback)
