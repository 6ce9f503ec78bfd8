"""A stand-in for CuPy on a processor: the part of it that this project needs, and nothing more.

`install()` makes `import cupy` give the stand-in, `uninstall()` undoes it, `installed()` does both.
Memory is host memory, kernels run in `cudasim`, and what a GPU leaves to luck is made visible:

- Work is queued for each stream and runs, by policy, as late as possible (lazy), at once (eager), or in
  between (random). What nobody has waited for is still 0xA5, as new memory is; so is pinned memory from
  when a copy into it is queued.
- Each access to memory is compared with those before it in the order that streams, events and the host
  make: `StreamRace` names two that are in no order. Pointers to const are read by a kernel, the others
  written, in the extent of the array that is given. Pointers inside of structures are not followed.
- The arguments of a kernel become what CuPy makes of them, and are then compared with its parameters.

`check_late()` raises what was found where no exception could be raised: memory of a pool, or pinned
memory, that was let go while queued work may still use it. Plain `Memory` is exempt from that: cudaFree
waits for the device. One clock serves all threads of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import re
import sys
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from cudasim import KERNEL, LaunchError, Module
from cudasim.arrays import Arithmetic, compute, gather, offered, partition, scatter

POLICIES = ("lazy", "eager", "random")
UNSET = 0xA5
"""What each byte of new memory holds."""

MEMORY = 8 << 30
"""Bytes that a device has."""

MOST_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel gets without asking for more."""

launches: list[str] = []
"""The kernels launched since `reset_counts`, in order."""

allocations = 0
"""How many times device memory was allocated since `reset_counts`, by a pool or directly."""

Clock = dict[int, int]
Waits = list[tuple["_Queue", int]]
Run = Callable[[], object]
Range = tuple["_Block", int, int, bool]
"""Bytes of a block from begin to end, and whether they are written."""

Allocator = Callable[[int], "MemoryPointer"]


class StreamRace(AssertionError):  # noqa: N818 (it is no error of CuPy's)
    """Two accesses to the same memory, at least one a write, that nothing puts in an order."""


class CUDARuntimeError(RuntimeError):
    """As CuPy's: made from a status, with the status as attribute."""

    NAMES: ClassVar = {
        1: "cudaErrorInvalidValue: invalid argument",
        2: "cudaErrorMemoryAllocation: out of memory",
        21: "cudaErrorInvalidMemcpyDirection: invalid copy direction for memcpy",
        100: "cudaErrorNoDevice: no CUDA-capable device is detected",
        101: "cudaErrorInvalidDevice: invalid device ordinal",
        400: "cudaErrorInvalidResourceHandle: invalid resource handle",
        600: "cudaErrorNotReady: device not ready",
        700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    }

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(self.NAMES[status])


class CUDADriverError(RuntimeError):
    """As CuPy's, which the stand-in raises and does not offer."""


class CompileException(Exception):  # noqa: N818 (CuPy's name)
    """As CuPy's: a kernel's source does not compile."""

    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str) -> None:
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend
        super().__init__(msg)


class OutOfMemoryError(MemoryError):
    """As CuPy's: of a pool that has reached its limit, or the device's end."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        bound = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{bound})."
        )


# What happens before what.


def _join(clock: Clock, other: Clock) -> None:
    for key, value in other.items():
        if clock.get(key, 0) < value:
            clock[key] = value


class _Access:
    """One use of a range of bytes by the n-th operation of a queue."""

    __slots__ = ("begin", "end", "n", "queue", "what", "write")

    def __init__(self, queue: _Queue, what: str, begin: int, end: int, write: bool) -> None:
        self.queue, self.n, self.what = queue.id, queue.last + 1, f"{what} on {queue.name}"
        self.begin, self.end, self.write = begin, end, write

    def before(self, clock: Clock) -> bool:
        return clock.get(self.queue, 0) >= self.n

    def conflicts(self, other: _Access) -> bool:
        return (self.write or other.write) and self.begin < other.end and other.begin < self.end

    def replaces(self, other: _Access) -> bool:
        """Return whether what is in order with this access is so with the other, an earlier one, too."""
        return (self.write or not other.write) and self.begin <= other.begin and other.end <= self.end


class _Queue:
    """The work of one stream; public streams are handles of it, which may go earlier."""

    ids = count(1)

    def __init__(self, machine: _Machine, device: int, *, null: bool = False, blocking: bool = True) -> None:
        self.machine, self.device, self.null, self.blocking = machine, device, null, blocking
        self.id = next(self.ids)
        self.ptr = 0 if null else 0x5000 + 16 * self.id
        self.name = "the null stream" if null else f"stream {self.ptr:#x}"
        self.clock: Clock = {}
        self.last = self.finished = 0
        self.abandoned = False
        self.items: deque[tuple[int, Waits, Run | None]] = deque()

    def submit(
        self,
        what: str,
        run: Run | None,
        accesses: Sequence[Range] = (),
        after: _Mark | None = None,
    ) -> int:
        """Queue an operation that uses these ranges; return its number."""
        with self.machine.lock:
            waits = self._ordered()
            if after is not None:
                _join(self.clock, after.clock)
                waits.append((after.queue, after.n))
            for block, begin, end, write in accesses:
                if block.device not in (None, self.device):
                    raise CUDARuntimeError(700)
                block.use(_Access(self, what, begin, end, write), self.clock)
            self.last += 1
            self.clock[self.id] = self.last
            self.items.append((self.last, waits, run))
            self.machine.submitted(self)
            return self.last

    def known(self) -> Clock:
        """Return what is finished when an operation queued now begins."""
        clock = dict(self.clock)
        _join(clock, self.machine.host)
        for other in self._legacy():
            _join(clock, other.clock)
        if self.null:
            _join(clock, self.machine.departed[True])
        return clock

    def drain(self, last: int) -> None:
        """Run operations up to this number, and what they wait for."""
        waiting: Waits = [(self, last)]
        while waiting:
            queue, last = waiting[-1]
            if not queue.items or queue.finished >= last:
                waiting.pop()
                continue
            number, waits, run = queue.items[0]
            unfinished = [(other, n) for other, n in waits if other.items and other.finished < n]
            if unfinished:
                waiting += unfinished
                continue
            queue.items.popleft()
            queue.finished = number
            if run is not None:
                run()

    def synchronize(self) -> None:
        with self.machine.lock:
            if self.null:
                self.submit("synchronize", None)
            self.drain(self.last)
            _join(self.machine.host, self.clock)

    def mark(self) -> _Mark:
        with self.machine.lock:
            mark = _Mark(self)
            mark.n = self.submit("record", mark.stamp)
            mark.clock = dict(self.clock)
            return mark

    def _legacy(self) -> list[_Queue]:
        """Return the queues that this one waits for without being told to."""
        if not self.blocking:
            return []
        if not self.null:
            return [self.machine.nulls[self.device]]
        streams = self.machine.queues.values()
        return [queue for queue in streams if queue.blocking and queue.device == self.device]

    def _ordered(self) -> Waits:
        self.clock = self.known()
        return [(queue, queue.last) for queue in self._legacy() if queue.items]


class _Mark:
    """What an event has recorded: all of a queue's work up to an operation."""

    def __init__(self, queue: _Queue) -> None:
        self.queue, self.n, self.time = queue, 0, 0.0
        self.clock: Clock = {}

    def stamp(self) -> None:
        self.time = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.queue.finished >= self.n


class _Thread(threading.local):
    """A thread's current device, and its current stream on each device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.entered: list[tuple[int, Stream]] = []

    def leave(self) -> None:
        """Make the stream entered before current again: as in CuPy, not one that was made so by `use`."""
        device, _ = self.entered.pop()
        before = [stream for on, stream in self.entered if on == device]
        self.streams[device] = before[-1] if before else Stream.null


class _Machine:
    """Devices and their work, from `install` to `uninstall`."""

    def __init__(self, lane: str, policy: str, seed: int, devices: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}")
        self.lane, self.policy, self.devices = lane, policy, devices
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.host: Clock = {}
        self.departed: dict[bool, Clock] = {True: {}, False: {}}  # of blocking streams, and of the others
        self.queues: dict[int, _Queue] = {}
        self.nulls = [_Queue(self, device, null=True) for device in range(devices)]
        self.blocks: dict[int, _Block] = {}
        self.addresses: list[int] = []
        self.allocated = [0] * devices
        self.late: list[str] = []
        self.thread = _Thread()
        self.pool = MemoryPool()
        self.allocator: Allocator = self.pool.malloc

    def device(self) -> int:
        if not self.devices:
            raise CUDARuntimeError(100)
        return self.thread.device

    def submitted(self, queue: _Queue) -> None:
        if self.policy == "eager":
            queue.drain(queue.last)
        elif self.policy == "random":
            for other in [*self.nulls, *self.queues.values()]:
                if other.items and self.random.random() < 0.5:
                    other.drain(self.random.randint(other.finished, other.last))

    def queue(self, ptr: int) -> _Queue:
        if ptr == 0:
            return self.nulls[self.device()]
        if ptr not in self.queues or self.queues[ptr].abandoned:
            raise CUDARuntimeError(400)
        return self.queues[ptr]

    def find(self, address: int) -> _Block | None:
        """Return the block of device or pinned memory that an address lies in."""
        place = bisect_right(self.addresses, address) - 1
        if place < 0:
            return None
        block = self.blocks[self.addresses[place]]
        return block if address < block.address + block.size else None

    def forget(self) -> None:
        """Drop the queues that have no stream and no work any more."""
        with self.lock:
            for queue in [*self.queues.values()]:
                if queue.abandoned and not queue.items:
                    _join(self.departed[queue.blocking], queue.clock)
                    del self.queues[queue.ptr]

    def synchronize(self, device: int) -> None:
        with self.lock:
            for queue in [*self.nulls, *self.queues.values()]:
                if queue.device == device:
                    queue.synchronize()
            for clock in self.departed.values():
                _join(self.host, clock)


_machine: _Machine | None = None


def _here() -> _Machine:
    if _machine is None:
        raise RuntimeError("the stand-in for CuPy is not installed")
    return _machine


def _current() -> _Queue:
    return get_current_stream()._queue


# Memory.

_libc = ctypes.CDLL(None)
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def _aligned(size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return bytes of its own from malloc, so that AddressSanitizer watches both ends."""
    pointer = ctypes.c_void_p()
    if _libc.posix_memalign(ctypes.byref(pointer), 256, size):
        raise MemoryError(f"no {size} bytes for simulated memory")
    address = pointer.value or 0
    ctypes.memset(address, UNSET, size)
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, _libc.free, address).atexit = False
    return array


class _Block:
    """The bytes of one allocation, and the accesses to it that later ones are compared with."""

    def __init__(self, machine: _Machine, size: int, device: int | None) -> None:
        self.machine, self.size, self.device = machine, size, device
        array = _aligned(size)
        self.address = ctypes.addressof(array)
        self.bytes = np.frombuffer(array, np.uint8)
        self.accesses: list[_Access] = []
        with machine.lock:
            machine.blocks[self.address] = self
            insort(machine.addresses, self.address)

    def use(self, access: _Access, clock: Clock) -> None:
        kept = []
        for old in self.accesses:
            ordered = old.queue == access.queue or old.before(clock)
            if not ordered and access.conflicts(old):
                raise StreamRace(f"{access.what} is not ordered after {old.what}")
            if not (ordered and access.replaces(old)):
                kept.append(old)
        if len(kept) > 32:
            kept = [old for old in kept if not old.before(self.machine.host)]
        self.accesses = [*kept, access]

    def unfinished(self, clock: Clock, begin: int = 0, end: int | None = None) -> str | None:
        """Return an access to a range that is not finished for who knows this clock."""
        end = self.size if end is None else end
        for old in self.accesses:
            if begin < old.end and old.begin < end and not old.before(clock):
                return old.what
        return None

    def range_of(self, address: int, size: int, write: bool) -> Range:
        begin = address - self.address
        if begin + size > self.size:
            raise CUDARuntimeError(1)
        return self, begin, begin + size, write

    def free(self, what: str, clock: Clock | None) -> None:
        """Forget the block; queued work keeps its bytes."""
        machine = self.machine
        with machine.lock:
            if clock is not None and (user := self.unfinished(clock)):
                machine.late.append(f"{what} of {self.size} bytes was freed while {user} may still use it")
            del machine.blocks[self.address]
            machine.addresses.remove(self.address)
            if self.device is not None:
                machine.allocated[self.device] -= self.size


def _part(place: Range) -> np.ndarray:
    block, begin, end, _ = place
    return block.bytes[begin:end]


class _BaseMemory:
    block: _Block | None = None
    device_id: int
    size: int

    @property
    def ptr(self) -> int:
        return self.block.address if self.block else 0

    def __int__(self) -> int:
        return self.ptr

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Memory(_BaseMemory):
    """Memory from cudaMalloc."""

    def __init__(self, size: int) -> None:
        global allocations
        machine = _here()
        self.size, self.device_id = size, machine.device()
        if size <= 0:
            return
        if machine.allocated[self.device_id] + size > MEMORY:
            raise CUDARuntimeError(2)
        self.block = _Block(machine, size, self.device_id)
        machine.allocated[self.device_id] += size
        allocations += 1

    def __del__(self) -> None:
        if self.block:
            self.block.free("memory", None)


class _PooledMemory(_BaseMemory):
    """Memory that a pool lends: when freed, the pool may lend it again, ordered by the stream alone."""

    def __init__(self, memory: Memory, pool: MemoryPool) -> None:
        self.size, self.device_id, self.block = memory.size, memory.device_id, memory.block
        self._memory, self._pool, self._queue = memory, pool, _current()
        pool._used += _rounded(self.size)

    def __del__(self) -> None:
        self._pool._used -= _rounded(self.size)
        if self.block is None:
            return
        machine, name = self.block.machine, self._queue.name
        with machine.lock:
            if user := self.block.unfinished(self._queue.known()):
                freed = f"memory of {self.size} bytes from {name} was freed"
                machine.late.append(f"{freed} while {user} may still use it")


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


class MemoryPointer:
    """A place in device memory, which it keeps."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem: _BaseMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device(self) -> Device:
        return self.mem.device

    @property
    def device_id(self) -> int:
        return self.mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset


class MemoryPool:
    """A pool that keeps nothing back, so that memory freed too early is not found intact."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self._allocator = allocator or _plain
        self._used = self._limit = 0

    def malloc(self, size: int) -> MemoryPointer:
        if self._limit and self._used + _rounded(size) > self._limit:
            raise OutOfMemoryError(_rounded(size), self._used, self._limit)
        try:
            memory = self._allocator(size).mem
        except CUDARuntimeError as error:
            if error.status != 2:
                raise
            raise OutOfMemoryError(_rounded(size), self._used, self._limit) from None
        return MemoryPointer(_PooledMemory(memory, self), 0)

    def used_bytes(self) -> int:
        return self._used

    def get_limit(self) -> int:
        return self._limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if (size is None) == (fraction is None):
            raise ValueError("size and fraction must not be specified at one time, or both be omitted")
        self._limit = int(MEMORY * fraction) if size is None else size

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        """Do nothing: there are none."""


def _plain(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def get_default_memory_pool() -> MemoryPool:
    return _here().pool


def get_allocator() -> Allocator:
    return _here().allocator


def set_allocator(allocator: Allocator | None = None) -> None:
    _here().allocator = allocator or _plain


class _PinnedMemory:
    """What a pinned pointer, and each NumPy array over it, keeps."""

    block: _Block | None = None

    def __init__(self, machine: _Machine, size: int) -> None:
        self.size, self.block = size, _Block(machine, max(size, 1), None)

    def __del__(self) -> None:
        if self.block:
            self.block.free("pinned memory", self.block.machine.host)


def alloc_pinned_memory(size: int) -> Any:
    """Return pinned host memory, an object with the buffer protocol."""
    machine = _here()
    machine.device()
    memory = _PinnedMemory(machine, size)
    kind = type("PinnedMemoryPointer", (ctypes.c_ubyte * size,), {"size": lambda self: self.mem.size})
    pointer = kind.from_address(memory.block.address)
    pointer.mem, pointer.ptr = memory, memory.block.address
    return pointer


# Streams, events and devices.


class Stream:
    """A stream; `Stream.null` is that of the current device."""

    null: Stream
    _own: _Queue | None = None

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._machine = _here()
        self.ptr, self.device_id = 0, -1
        if null:
            return
        self.device_id = self._machine.device()
        self._own = _Queue(self._machine, self.device_id, blocking=not non_blocking)
        self.ptr = self._own.ptr
        self._machine.forget()
        self._machine.queues[self.ptr] = self._own

    def __del__(self) -> None:
        if self._own:
            self._own.abandoned = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        device = self._matched()
        self._machine.thread.entered.append((device, self))
        self._machine.thread.streams[device] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.thread.leave()

    def use(self) -> Stream:
        self._machine.thread.streams[self._matched()] = self
        return self

    @property
    def done(self) -> bool:
        return _asked(self._queue, self._queue.last, self._queue.clock)

    def synchronize(self) -> None:
        self._queue.synchronize()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event._mark = self._queue.mark()
        return event

    def wait_event(self, event: Event) -> None:
        if event._mark is not None:
            self._queue.submit("wait", None, after=event._mark)

    @property
    def _queue(self) -> _Queue:
        return self._own or self._machine.nulls[self._machine.device()]

    def _matched(self) -> int:
        device = self._machine.device()
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({device})"
            )
        return device


def get_current_stream(device_id: int = -1) -> Stream:
    machine = _here()
    device = machine.device()
    return machine.thread.streams.get(device if device_id == -1 else device_id, Stream.null)


def _asked(queue: _Queue, n: int, clock: Clock) -> bool:
    """Return whether work is finished; if not, let some go on, so that asking again ends."""
    with queue.machine.lock:
        if queue.items and queue.finished < n:
            queue.drain(queue.finished + 1)
            return False
        _join(queue.machine.host, clock)
        return True


class Event:
    """A place in the work of a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:  # noqa: ARG002
        _here().device()
        self._timed = not disable_timing
        self._mark: _Mark | None = None

    @property
    def done(self) -> bool:
        return self._mark is None or _asked(self._mark.queue, self._mark.n, self._mark.clock)

    def record(self, stream: Stream | None = None) -> None:
        (stream or get_current_stream()).record(self)

    def synchronize(self) -> None:
        if self._mark is not None:
            machine = self._mark.queue.machine
            with machine.lock:
                self._mark.queue.drain(self._mark.n)
                _join(machine.host, self._mark.clock)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return milliseconds between two recorded events that are finished."""
    start, end = start_event._mark, end_event._mark
    if start is None or end is None or not (start_event._timed and end_event._timed):
        raise CUDARuntimeError(400)
    if not (start.finished and end.finished):
        raise CUDARuntimeError(600)
    return 1e3 * (end.time - start.time)


class Device:
    """One of the devices, by default the current one."""

    compute_capability = "90"

    def __init__(self, device: int | None = None) -> None:
        self.id = _here().device() if device is None else int(device)
        self._before: list[int] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self._before.append(getDevice())
        setDevice(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        setDevice(self._before.pop())

    def use(self) -> Device:
        setDevice(self.id)
        return self

    def synchronize(self) -> None:
        _here().synchronize(self.id)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 4}

    @property
    def mem_info(self) -> tuple[int, int]:
        return MEMORY - _here().allocated[self.id], MEMORY


# The runtime's own functions, with its names.


def getDeviceCount() -> int:  # noqa: N802
    machine = _here()
    machine.device()
    return machine.devices


def getDevice() -> int:  # noqa: N802
    return _here().device()


def setDevice(device: int) -> None:  # noqa: N802
    if not 0 <= device < getDeviceCount():
        raise CUDARuntimeError(101)
    _here().thread.device = device


def runtimeGetVersion() -> int:  # noqa: N802
    return 13020


def driverGetVersion() -> int:  # noqa: N802
    return 13020


HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
COPIES = {
    HOST_TO_DEVICE: "a copy to the device",
    DEVICE_TO_HOST: "a copy to the host",
    DEVICE_TO_DEVICE: "a copy",
}


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    """Copy bytes. From pageable memory they are taken at once; to it, the host waits."""
    machine, queue = _here(), _here().queue(stream)
    if kind not in COPIES:
        raise CUDARuntimeError(21)
    if size == 0:
        return
    target, source = machine.find(dst), machine.find(src)
    _check_sides(target, source, kind)
    accesses = []
    if target is not None:
        accesses.append(target.range_of(dst, size, True))
        into = _part(accesses[-1])
    else:
        into = np.frombuffer((ctypes.c_ubyte * size).from_address(dst), np.uint8)
    if source is not None:
        accesses.append(source.range_of(src, size, False))
        taken = _part(accesses[-1])
    else:
        taken = np.frombuffer(ctypes.string_at(src, size), np.uint8)
    _forget_host(accesses)
    with machine.lock:
        number = queue.submit(COPIES[kind], partial(np.copyto, into, taken), accesses)
        if target is None:
            queue.drain(number)


def _forget_host(accesses: Sequence[Range]) -> None:
    """Make pinned memory that a copy will fill unset, so that what it held before does not pass for it."""
    for block, begin, end, write in accesses:
        unused = block.unfinished(block.machine.host, begin, end) is None
        if write and unused and block.device is None:
            block.bytes[begin:end] = UNSET


def _check_sides(target: _Block | None, source: _Block | None, kind: int) -> None:
    for block, on_device in ((target, kind != DEVICE_TO_HOST), (source, kind != HOST_TO_DEVICE)):
        if on_device != (block is not None and block.device is not None):
            raise CUDARuntimeError(1)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
    queue, block = _here().queue(stream), _here().find(ptr)
    if size == 0:
        return
    if block is None or block.device is None:
        raise CUDARuntimeError(1)
    place = block.range_of(ptr, size, True)
    queue.submit("memset", partial(_part(place).fill, value & 0xFF), [place])


# Arrays.


class _Flags:
    """As CuPy's: it has none of NumPy's others, such as `writeable`."""

    def __init__(self, flags: Any, owndata: bool) -> None:
        self.c_contiguous, self.f_contiguous = bool(flags.c_contiguous), bool(flags.f_contiguous)
        self.owndata = owndata


def _no(what: str) -> Callable[..., Any]:
    def refused(*_: object) -> Any:
        raise TypeError(f"the stand-in for cupy.ndarray has no {what}")

    return refused


class ndarray(Arithmetic):  # noqa: N801
    """An array in device memory."""

    __iter__ = __contains__ = None
    __ne__ = __lt__ = __le__ = __ge__ = _no("such comparison")
    __bool__ = _no("truth value")

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        if order != "C":
            raise ValueError("the stand-in for cupy.ndarray has only order C")
        self.dtype = np.dtype(dtype)
        self.shape = tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),)
        self.size = math.prod(self.shape)
        self.itemsize, self.ndim = self.dtype.itemsize, len(self.shape)
        self.nbytes = self.size * self.itemsize
        self.data = _here().allocator(self.nbytes) if memptr is None else memptr
        self._block = self.data.mem.block
        # The bytes as the host sees them: kept from users, held by queued work.
        if self._block is None:
            self._host = np.empty(self.shape, self.dtype)
        else:
            offset = self.data.ptr - self._block.address
            self._host = np.ndarray(self.shape, self.dtype, self._block.bytes, offset, strides)
        self.strides = self._host.strides
        self.flags = _Flags(self._host.flags, memptr is None)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self._viewed(self._host.T)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __getitem__(self, key: Any) -> ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        if _are_indices(keys):
            return compute(gather, self, *keys)
        if not all(isinstance(k, (int, np.integer, slice)) or k is Ellipsis for k in keys):
            raise TypeError("the stand-in for cupy.ndarray has basic slices, or its arrays of integers")
        if not any(k is Ellipsis for k in keys):
            keys = (*keys, Ellipsis)
        return self._viewed(self._host[keys])

    def __setitem__(self, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        if _are_indices(keys):
            compute(scatter, self, value, *keys, out=self)
            return
        target = self[key]
        if not isinstance(value, ndarray):
            target.fill(value)
            return
        source = np.broadcast_to(value._host, target.shape)
        run = partial(np.copyto, target._host, source, casting="unsafe")
        _current().submit("assignment", run, [*value._range(False), *target._range(True)])

    def fill(self, value: Any) -> None:
        if isinstance(value, (np.ndarray, ndarray)):
            raise TypeError(f"Unsupported type {type(value)}")
        scalar = np.array(value, self.dtype)
        _current().submit("fill", partial(np.copyto, self._host, scalar), self._range(True))

    def view(self, dtype: Any = None) -> ndarray:
        return self if dtype is None else self._viewed(self._host.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        if not self.flags.c_contiguous:
            raise ValueError("the stand-in for cupy.ndarray reshapes only contiguous arrays")
        return self._viewed(self._host.reshape(*shape))

    def set(self, arr: Any, stream: Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        pinned = _pinned(arr, False) if arr.flags.c_contiguous else []
        source = _bytes_of(arr, pinned) if pinned else np.array(arr)
        queue = _current() if stream is None else stream._queue
        queue.submit(
            COPIES[HOST_TO_DEVICE], partial(np.copyto, self._host, source), [*pinned, *self._range(True)]
        )

    def get(
        self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray:
        if order != "C":
            raise ValueError("the stand-in for cupy.ndarray has only order C")
        out = self._output(out)
        if self.size == 0:
            return out
        queue = _current() if stream is None else stream._queue
        pinned = _pinned(out, True)
        _forget_host(pinned)
        run = partial(np.copyto, _bytes_of(out, pinned), self._host)
        queue.submit(COPIES[DEVICE_TO_HOST], run, [*self._range(False), *pinned])
        if blocking:
            queue.synchronize()
        return out

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        for block, begin, end, _ in self._range(False):
            if user := block.unfinished(_here().host, begin, end):
                raise StreamRace(
                    f"__cuda_array_interface__ is read before {user} was synchronized with the host"
                )
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def _output(self, out: Any) -> np.ndarray:
        if out is None:
            return np.full(self.nbytes, UNSET, np.uint8).view(self.dtype).reshape(self.shape)
        if not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        if not out.flags.c_contiguous:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        return out

    @staticmethod
    def _submit(what: str, run: Run, accesses: Sequence[Range]) -> None:
        _current().submit(what, run, accesses)

    def _viewed(self, host: np.ndarray) -> ndarray:
        offset = host.__array_interface__["data"][0] - self._block.address if self._block else 0
        return ndarray(host.shape, host.dtype, MemoryPointer(self.data.mem, offset), host.strides)

    def _range(self, write: bool) -> list[Range]:
        """Return the bytes from the first entry to the last."""
        if self._block is None or self.size == 0:
            return []
        begin = end = self.data.ptr - self._block.address
        for n, stride in zip(self.shape, self.strides, strict=True):
            begin, end = begin + min(0, (n - 1) * stride), end + max(0, (n - 1) * stride)
        return [(self._block, begin, end + self.itemsize, write)]


def _are_indices(keys: tuple[Any, ...]) -> bool:
    return keys != () and all(isinstance(k, ndarray) and k.dtype.kind in "iu" for k in keys)


def _pinned(array: np.ndarray, write: bool) -> list[Range]:
    """Return where in pinned memory an array is, or nothing."""
    address = array.__array_interface__["data"][0]
    block = _here().find(address)
    return [block.range_of(address, array.nbytes, write)] if block and block.device is None else []


def _bytes_of(array: np.ndarray, pinned: Sequence[Range]) -> np.ndarray:
    """Return the same array, without keeping the pinned memory from being let go too early."""
    return _part(pinned[0]).view(array.dtype).reshape(array.shape) if pinned else array


def empty(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> ndarray:
    array = ndarray(shape, dtype, order=order)
    if array._block is not None:
        memsetAsync(array.data.ptr, 0, array.nbytes, get_current_stream().ptr)
    return array


def zeros_like(a: ndarray) -> ndarray:
    return zeros(a.shape, a.dtype)


def arange(stop: int) -> ndarray:
    return asarray(np.arange(stop))


def flatnonzero(a: ndarray) -> ndarray:
    """Wait for the stream, as CuPy does to know the size."""
    return asarray(np.flatnonzero(a.get()))


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    """Return a host array on the device, staged: what the host does to it then is not seen."""
    if order not in (None, "C") or copy is not None:
        raise ValueError("the stand-in for cupy.asarray has neither order nor copy")
    if isinstance(a, ndarray):
        if dtype is not None and a.dtype != np.dtype(dtype):
            raise TypeError("the stand-in for cupy.ndarray does not convert")
        return a
    host = np.array(a, dtype, order="C")
    if host.dtype.kind not in "?iuf":
        raise ValueError(f"Unsupported dtype {host.dtype}")
    array = ndarray(host.shape, host.dtype)
    array.set(host)
    if blocking:
        _current().synchronize()
    return array


def asnumpy(
    a: Any, stream: Stream | None = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> np.ndarray:
    if not isinstance(a, ndarray):
        raise TypeError("the stand-in for cupy.asnumpy takes only its arrays")
    return a.get(stream, order, out, blocking)


# Kernels.

PATH = "rawmodule.cu"
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
C_LINKAGE = re.compile(r'extern\s+"C"\s*')
ACCEPTED = ("-I", "-D", "--std=c++17", "-std=c++17", "--fmad=false", "-fmad=false")


def _inlined(text: str, name: str, folders: Sequence[Path], seen: set[Path]) -> str:
    """Return a source with the headers that are found in the folders put in, each once."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        header = _header(match[1], folders) if match else None
        if header is None:
            lines.append("" if ONCE.match(line) else line)
        elif header not in seen:
            seen.add(header)
            inner = _inlined(header.read_text(), str(header), [header.parent, *folders], seen)
            lines += [f'#line 1 "{header}"', inner, f'#line {number + 1} "{name}"']
        else:
            lines.append("")
    return "\n".join(lines)


def _header(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path.resolve() for folder in folders if (path := folder / name).is_file()), None)


def _c_kernels(text: str) -> list[str]:
    """Return the kernels whose names C++ leaves as they are."""
    names = []
    for match in C_LINKAGE.finditer(text):
        names += [
            kernel["name"] for kernel in KERNEL.finditer(text, match.end(), _closing(text, match.end()))
        ]
    return names


def _closing(text: str, begin: int) -> int:
    """Return the end of the braces that open here, or else of the declaration."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 or not text.startswith("{", begin):
            return begin + brace.end()
    return len(text)


@cache
def _compiled(text: str, names: tuple[str, ...], lane: str, defines: tuple[str, ...]) -> Module:
    return Module(text, names, lane, defines=defines, path=PATH)


class RawModule:
    """Kernels from a source text, compiled when the first is asked for."""

    def __init__(
        self,
        code: str | None = None,
        *,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(code, str):
            raise TypeError("the stand-in for cupy.RawModule takes only code")
        if not isinstance(options, tuple):
            raise TypeError(
                f"Argument 'options' has incorrect type (expected tuple, got {type(options).__name__})"
            )
        if backend != "nvrtc":
            raise ValueError("the stand-in for cupy.RawModule has only the backend nvrtc")
        self._code, self._options, self._names = code, options, tuple(name_expressions or ())
        self._module: Module | None = None

    def get_function(self, name: str) -> _Kernel:
        _here().device()
        if self._module is None:
            self._compile()
        if name not in self._offered:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return _Kernel(self._module, name)

    def _compile(self) -> None:
        options = self._options
        folders = [Path(option[2:]) for option in options if option.startswith("-I")]
        defines = tuple(option[2:] for option in options if option.startswith("-D"))
        try:
            if unknown := [option for option in options if not option.startswith(ACCEPTED)]:
                raise LaunchError(f"the stand-in knows no option {unknown[0]}")
            text = _inlined(self._code, PATH, folders, set())
            self._offered = (*self._names, *_c_kernels(text))
            self._module = _compiled(text, self._offered, _here().lane, defines)
        except LaunchError as error:
            raise CompileException(str(error), self._code, PATH, options, "nvrtc") from error


class _NullPointer(np.ndarray):
    """What a kernel is launched with for None."""

    @property
    def ctypes(self) -> Any:
        return SimpleNamespace(data=0)


NULL = np.empty(0, np.uint8).view(_NullPointer)
SCALARS = frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")


class _Kernel:
    """A kernel, to be called with grid, block and arguments."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self._name, self._signature = module, name, module.signature(name)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        name, signature = self._name, self._signature
        if shared_mem > MOST_SHARED:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        if len(args) != len(signature):
            raise LaunchError(f"{name}: {len(args)} arguments for {len(signature)} parameters")
        accesses: list[Range] = []
        values = []
        for number, (argument, (kind, size)) in enumerate(zip(args, signature, strict=True)):
            if kind in "RP":
                values.append(self._pointer(number, argument, kind == "P", accesses))
            else:
                values.append(self._value(number, argument, kind, size))
        sizes = _three("grid", grid), _three("block", block)
        launches.append(name)
        _current().submit(name, partial(self._module.launch, name, *sizes, values, shared_mem), accesses)

    def _pointer(self, number: int, argument: Any, write: bool, accesses: list[Any]) -> np.ndarray:
        if argument is None:
            return NULL
        if isinstance(argument, ndarray):
            accesses += argument._range(write)
            block, address = argument._block, argument.data.ptr
        elif isinstance(argument, MemoryPointer):
            block, address = argument.mem.block, argument.ptr
        elif isinstance(argument, (int, np.int64, np.uint64)):
            address = int(argument)
            block = _here().find(address)
        else:
            block, address = None, -1
        if block is None:
            if address == 0:
                return NULL
            given = _scalar(argument).dtype
            raise LaunchError(f"{self._name}: argument {number} is {given}, the parameter a pointer")
        offset = address - block.address
        if not isinstance(argument, ndarray):
            accesses.append((block, offset, block.size, write))
        return block.bytes[offset:]

    def _value(self, number: int, argument: Any, kind: str, size: int) -> np.generic:
        given = f"{self._name}: argument {number} is"
        expected = {"f": "floating", "i": "an integer", "s": "a structure"}[kind] + f" of {size} bytes"
        if argument is None or isinstance(argument, (ndarray, MemoryPointer)):
            raise LaunchError(f"{given} a pointer, the parameter {expected}")
        value = _scalar(argument)
        if value.itemsize != size or (kind == "f") != (value.dtype.kind == "f" and kind != "s"):
            raise LaunchError(f"{given} {value.dtype}, the parameter {expected}")
        return value


def _scalar(argument: Any) -> np.generic:
    """Return what CuPy passes by value."""
    if isinstance(argument, np.ndarray):
        if argument.size != 1:
            raise TypeError(
                f"You are trying to pass a numpy.ndarray of shape {argument.shape} as a kernel parameter. "
                "Only numpy.ndarrays of size one can be passed by value."
            )
        scalar: np.generic = argument.reshape(())[()]
        return scalar
    if type(argument) in SCALARS:
        return argument
    if isinstance(argument, int):
        return np.int64(argument)
    if isinstance(argument, float):
        return np.float64(argument)
    raise TypeError(f"Unsupported type {type(argument)}")


def _three(what: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return three sizes, with 1 for 0 as CuPy has it."""
    if not isinstance(size, tuple):
        raise TypeError(f"Argument '{what}' has incorrect type (expected tuple, got {type(size).__name__})")
    return tuple(max(1, int(n)) for n in (*size, 1, 1)[:3])


# What is importable, and when.

MODULES: dict[str, dict[str, Any]] = {
    "cupy": {
        "RawModule": RawModule,
        "arange": arange,
        "asarray": asarray,
        "asnumpy": asnumpy,
        "empty": empty,
        "exp": offered(np.exp),
        "flatnonzero": flatnonzero,
        "get_default_memory_pool": get_default_memory_pool,
        "log": offered(np.log),
        "matmul": offered(np.matmul),
        "maximum": offered(np.maximum),
        "ndarray": ndarray,
        "partition": partition,
        "zeros": zeros,
        "zeros_like": zeros_like,
        "__version__": "14.2.0",
        "standin": True,
    },
    "cupy.cuda": {
        "Device": Device,
        "Event": Event,
        "Memory": Memory,
        "MemoryPointer": MemoryPointer,
        "MemoryPool": MemoryPool,
        "Stream": Stream,
        "alloc_pinned_memory": alloc_pinned_memory,
        "get_allocator": get_allocator,
        "get_current_stream": get_current_stream,
        "get_elapsed_time": get_elapsed_time,
        "set_allocator": set_allocator,
    },
    "cupy.cuda.compiler": {"CompileException": CompileException},
    "cupy.cuda.memory": {"OutOfMemoryError": OutOfMemoryError},
    "cupy.cuda.runtime": {
        "CUDARuntimeError": CUDARuntimeError,
        "driverGetVersion": driverGetVersion,
        "getDevice": getDevice,
        "getDeviceCount": getDeviceCount,
        "memcpyAsync": memcpyAsync,
        "memcpyDeviceToDevice": DEVICE_TO_DEVICE,
        "memcpyDeviceToHost": DEVICE_TO_HOST,
        "memcpyHostToDevice": HOST_TO_DEVICE,
        "memsetAsync": memsetAsync,
        "runtimeGetVersion": runtimeGetVersion,
        "setDevice": setDevice,
    },
}

_replaced: dict[str, ModuleType] = {}


def install(lane: str = "fast", policy: str = "lazy", seed: int = 1, devices: int = 1) -> None:
    """Make `import cupy` give the stand-in, with nothing allocated and nothing queued.

    Parameters
    ----------
    lane : {"fast", "check", "asan", "tsan", "count"}
        How kernels are built.
    policy : {"lazy", "eager", "random"}
        When queued work runs.
    seed : int
        Of the random policy.
    devices : int
        How many there are; without any, what needs one raises `CUDARuntimeError`.
    """
    global _machine
    if _machine is not None:
        raise RuntimeError("the stand-in for CuPy is installed already")
    _machine = _Machine(lane, policy, seed, devices)
    _replaced.update(_loaded())
    Stream.null = Stream(null=True)
    reset_counts()
    for name in [*_replaced]:
        del sys.modules[name]
    for name, names in MODULES.items():
        module = ModuleType(name, "A stand-in for tests.")
        module.__spec__ = ModuleSpec(name, None, is_package=name in ("cupy", "cupy.cuda"))
        if module.__spec__.submodule_search_locations is not None:
            module.__path__ = []
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def uninstall() -> None:
    """Undo `install`; what is still queued never runs."""
    global _machine
    _here()
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()
    _machine = None


def _loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cupy"}


@contextlib.contextmanager
def installed(
    lane: str = "fast", policy: str = "lazy", seed: int = 1, devices: int = 1
) -> Iterator[ModuleType]:
    """Install for a while, see `install`; `check_late` at the end unless there was an exception."""
    install(lane, policy, seed, devices)
    try:
        yield sys.modules["cupy"]
        check_late()
    finally:
        uninstall()


def check_late() -> None:
    """Raise what was found since the last call where nothing could be raised.

    Raises
    ------
    StreamRace
        If memory was freed while queued work may still use it.
    """
    late = _here().late
    found = "; ".join(late)
    late.clear()
    if found:
        raise StreamRace(found)


def reset_counts() -> None:
    """Begin to count anew."""
    global allocations
    allocations = 0
    launches.clear()
