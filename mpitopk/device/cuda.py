"""A GPU, through CuPy: the kernels of kernels/*.cu on CuPy arrays, launched on the current stream.

An operation waits for the GPU where it returns a value, and only there.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpitopk.device.cuda_codes import CudaCodes
from mpitopk.device.launch import (
    GRADIENTS,
    STRETCH,
    VALUES,
    Array,
    allocate,
    launch,
    value,
)
from mpitopk.device.pairs import Pairs
from mpitopk.device.selector import Selector
from mpitopk.errors import DeviceError
from mpitopk.wire import HEADER, misplaced

if TYPE_CHECKING:
    from mpitopk.plan import Plan
    from mpitopk.wire import Heads, Message, Messages

OLDEST_CUPY = (14, 1)
"""Earlier releases sort wrongly when memory is short."""

PLANS = 2
"""For which there is room at a time."""


def usable() -> str:
    """Return why no GPU can be used here, or nothing if a kernel has run on one."""
    version = tuple(int(part) for part in re.findall(r"\d+", cupy.__version__)[:2])
    if version < OLDEST_CUPY:
        return f"CuPy {cupy.__version__} is too old: install 14.1 or later"
    try:
        if cupy.cuda.runtime.getDeviceCount() < 1:
            return "there is no GPU"
        device = CudaDevice()
        x = device.from_host(np.array([3, 6], np.float32))
        if not device.divide(x, 3) or cupy.asnumpy(x).tolist() != [1, 2]:
            return "a kernel ran and gave a wrong result"
    except OSError as error:
        return f"CuPy cannot keep kernels ({error}): set CUPY_CACHE_DIR to a folder that can be written"
    except Exception as error:  # CuPy and the driver raise many kinds
        return f"{type(error).__name__}: {error}"
    return ""


def use_device_of(local_rank: int) -> int:
    """Make a GPU current, by turns among the ranks of a node, unless one other than the first is already."""
    if cupy.cuda.Device().id == 0:
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    return int(cupy.cuda.Device().id)


class CudaDevice(CudaCodes):
    """The current GPU. Computes in float32."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._selectors: dict[Plan, Selector] = {}
        self._fallbacks = 0
        self._pairs: Pairs | None = None
        self._pieces: tuple[Array, Array] | None = None
        self._heads = self.empty(0, "uint8")
        self._merged = self.empty(0, "uint32"), self.empty(0, "float32")
        self._sizes = self.empty(0, "uint32")
        self._sums = allocate(0, "float64")

    @property
    def fallbacks(self) -> int:
        return self._fallbacks

    def finite(self, x: Array) -> bool:
        flag, _ = self._cleared()
        launch(f"all_finite<{GRADIENTS[str(x.dtype)]}>", self._blocks(x.size), x, np.int64(x.size), flag)
        return value(flag) == 0

    def zero_nonfinite(self, x: Array) -> int:
        _, total = self._cleared()
        kernel = f"zero_nonfinite<{GRADIENTS[str(x.dtype)]}>"
        launch(kernel, self._blocks(x.size), x, np.int64(x.size), total)
        return value(total)

    def norm(self, x: Array) -> float:
        if x.size == 0:
            return 0.0
        kernel, n, start = f"squares<{GRADIENTS[str(x.dtype)]}>", x.size, 0
        if self._sums.size < 2 + n // (STRETCH - 1):
            self._sums = allocate(2 + n // (STRETCH - 1), "float64")
        while kernel != "sums" or n > 1:
            blocks = -(-n // STRETCH)
            to = self._sums[start : start + blocks]
            launch(kernel, blocks, x, np.int64(n), to)
            kernel, x, n, start = "sums", to, blocks, start + blocks
        return math.sqrt(cupy.asnumpy(x)[0])

    def accumulate(
        self, gradient: Array, residual: Array | None, out: Array, *, scale: float = 1, keep: float = 1
    ) -> bool:
        flag, _ = self._cleared()
        kernel = f"accumulate<{GRADIENTS[str(gradient.dtype)]}>"
        factors = np.float32(scale), np.float32(keep)
        launch(kernel, self._blocks(out.size), gradient, residual, out, np.int64(out.size), *factors, flag)
        return value(flag) == 0

    def accumulate_select(
        self, gradient: Array, residual: Array, out: Array, plan: Plan, indices: Array, values: Array
    ) -> bool:
        finite, missed = self._selector_for(plan).run(gradient, residual, out, indices, values)
        self._fallbacks += missed
        return finite

    def select(self, x: Array, plan: Plan, indices: Array, values: Array) -> bool:
        finite, missed = self._selector_for(plan).run(x, None, None, indices, values)
        self._fallbacks += missed
        return finite

    def move_above(
        self, x: Array, plan: Plan, threshold: float, least: int, indices: Array, values: Array
    ) -> int:
        return self._selector_for(plan).move_above(x, threshold, least, indices, values)

    def chunk_maxima(self, x: Array, plan: Plan, chunk: int, indices: Array) -> None:
        self._selector_for(plan).chunk_maxima(x, chunk, indices)

    def sample(self, x: Array, plan: Plan, key: int, out: Array) -> None:
        self._selector_for(plan).sample(x, key, out)

    def random_indices(self, plan: Plan, key: int, out: Array) -> None:
        self._selector_for(plan).draw(key, out)

    def _selector_for(self, plan: Plan) -> Selector:
        """Return what is there for the plan; a scheme selects from its entries, and maybe from a sample."""
        selector = self._selectors.pop(plan, None) or Selector(plan)
        self._selectors[plan] = selector  # the latest comes last
        if len(self._selectors) > PLANS:
            del self._selectors[next(iter(self._selectors))]
        return selector

    def take(self, x: Array, indices: Array, values: Array, *, clear: bool) -> None:
        k = indices.size
        kernel = f"take<{GRADIENTS[str(x.dtype)]}>"
        launch(kernel, self._blocks(k), x, indices, values, np.int64(k), np.int32(clear))

    def pack(self, x: Array, plan: Plan, indices: Array, values: Array, message: Message) -> None:
        pieces, n_pieces = self._dense(plan.dense)
        to = message.indices if message.indices.size else None
        kernel = f"pack<{wire_type(message.values.itemsize)}>"
        blocks = self._blocks(max(indices.size, plan.dense_total))
        k = np.int64(indices.size)
        launch(kernel, blocks, x, indices, values, k, pieces, n_pieces, to, message.values)

    def merge(self, messages: Messages, dense: Array, divisor: int, out: Array) -> int:
        where, wrong, total = self._checked(messages, dense, out.size)
        kernel = f"merge<{wire_type(messages.itemsize)}>"
        blocks, n = -(-out.size // STRETCH), np.int64(out.size)
        launch(kernel, blocks, *where, np.float32(divisor), out, n, wrong, total)
        return self._intact(messages, out.size)

    def merge_sparse(
        self, messages: Messages, dense: Array, divisor: int, size: int, dtype: str
    ) -> tuple[Array, Array]:
        where, wrong, total = self._checked(messages, dense, size)
        kind, blocks, n = wire_type(messages.itemsize), -(-size // STRETCH), np.int64(size)
        room = min(size, sum(messages.counts) + int((dense[:, 1] - dense[:, 0]).sum()))
        if self._merged[0].size < room:
            self._merged = self.empty(room, "uint32"), self.empty(room, dtype)
        if self._sizes.size < blocks:
            self._sizes = self.empty(blocks, "uint32")
        sizes, (indices, values) = self._sizes, self._merged
        finished = self._result[4:8].view("uint32")
        launch(f"merge_count<{kind}>", blocks, *where, n, wrong, finished, sizes, total)
        launch(f"merge_write<{kind}>", blocks, *where, np.float32(divisor), n, wrong, sizes, indices, values)
        held = self._intact(messages, size)
        return indices[:held], values[:held]

    def reserve(self, plan: Plan) -> None:
        if self._pairs is None or self._pairs.plan is not plan:
            self._pairs = Pairs(plan)

    def combine(
        self, mine: Message, theirs: Message, plan: Plan, out: Message, indices: Array, values: Array
    ) -> bool:
        self.reserve(plan)
        wrong, total = self._cleared()
        report, k = (wrong, self._result[4:8].view("uint32"), total), plan.total
        x, y, to = (message.values[k:] for message in (mine, theirs, out))
        launch("add_dense", self._blocks(x.size), x, y, to, np.int64(x.size), wrong)
        finite = True
        if k:
            assert self._pairs is not None
            finite = self._pairs.run(mine, theirs, out, (indices, values), *report)
        found = value(wrong)
        if found & 1:
            raise misplaced()
        return finite and found == 0

    def put_back(self, x: Array, indices: Array, values: Array, winners: Array, *, among: bool) -> None:
        k = np.uint32(winners.size)
        launch(
            "put_back",
            self._blocks(indices.size),
            x,
            indices,
            values,
            np.int64(indices.size),
            winners,
            k,
            np.int32(among),
        )

    def divide(self, x: Array, divisor: int) -> bool:
        flag, _ = self._cleared()
        launch("divide", self._blocks(x.size), x, np.int64(x.size), np.float32(divisor), flag)
        return value(flag) == 0

    def heads(self, messages: Messages) -> Heads:
        ranks = len(messages.starts)
        if self._heads.size != ranks * HEADER.size:
            self._heads = self.empty(ranks * HEADER.size, "uint8")
        starts = self._on_gpu("starts", messages.starts)
        launch("heads", 1, messages.buffer, starts, np.int32(ranks), self._heads)
        words = memoryview(cupy.asnumpy(self._heads)).cast("q")
        return words, list(range(0, len(words), len(words) // ranks))

    def _dense(self, dense: Array) -> tuple[Array, np.int32]:
        """Return rows (start, stop, position among the dense values) on the GPU."""
        if self._pieces is None or self._pieces[0] is not dense:
            sizes = dense[:, 1] - dense[:, 0]
            rows = np.column_stack([dense, np.cumsum(sizes) - sizes])
            self._pieces = dense, self.from_host(np.append(rows.reshape(-1), 0))  # CuPy has no empty arrays
        return self._pieces[1], np.int32(len(dense))

    def _checked(self, messages: Messages, dense: Array, size: int) -> tuple[tuple[Any, ...], Array, Array]:
        """Let the GPU check the indices; return where messages are, and where it reports."""
        every = messages.counts
        starts, counts = self._on_gpu("starts", messages.starts), self._on_gpu("counts", every)
        wrong, total = self._cleared()
        ranks, blocks = np.int32(len(every)), self._blocks(max(every, default=0))
        launch("check", blocks, messages.buffer, starts, counts, ranks, np.int64(size), wrong)
        return (messages.buffer, starts, counts, ranks, *self._dense(dense)), wrong, total

    def _intact(self, messages: Messages, size: int) -> int:
        result = cupy.asnumpy(self._result)
        wrong, total = int(result[:4].view(np.uint32)[0]), int(result[8:].view(np.uint64)[0])
        return messages.intact(wrong - 1 - len(messages.starts) if wrong else total, size)


def wire_type(itemsize: int) -> str:
    """Return the type of values in a message."""
    if itemsize not in VALUES:
        raise DeviceError("a GPU sends values as float32 or float16: choose one of them")
    return VALUES[itemsize]
