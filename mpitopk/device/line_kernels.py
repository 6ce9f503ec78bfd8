"""Blocks and lines on a GPU: the kernels of lines.cu in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.device.launch import GRADIENTS, THREADS, Array, allocate, clear, launch, value

if TYPE_CHECKING:
    from mpitopk.lines import Lines

TOGETHER = 8
"""Blocks that a warp looks at, as in lines.cu."""


def columns(rows: np.ndarray) -> np.ndarray:
    """Return the vectors of each of some sets as columns, and zeros up to a multiple of a warp."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32), (0, 0)))
    return np.ascontiguousarray(padded.transpose(0, 2, 1))


class LineKernels:
    """The codebook, and room for what is found of each block."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        book = lines.book
        tree = book.representatives[None], book.vectors.reshape(-1, book.members, book.block)
        self._branches, self._members = (cupy.asarray(columns(x).reshape(-1)) for x in tree)
        self._vectors = cupy.asarray(book.vectors.reshape(-1))
        self._numbers = allocate(max(1, lines.blocks), "uint16")
        self._products = allocate(max(1, lines.blocks), "float32")
        self._flag = allocate(1, "uint32")

    def encode(self, gradient: Array, residual: Array, out: Array, words: Array) -> bool:
        """Return whether every sum is sound."""
        lines, found = self.lines, (self._numbers, self._products)
        size, flag = (np.int64(lines.entries), np.int32(lines.block)), self._flag
        scales, planes, hinges = lines.parts(words)
        clear(words)
        clear(flag)
        per_block = TOGETHER * THREADS // 32
        kernel, blocks = f"nearest_lines<{GRADIENTS[str(gradient.dtype)]}>", -(-lines.blocks // per_block)
        tree = self._branches, np.int32(len(lines.book.representatives)), self._members
        launch(
            kernel, blocks, gradient, residual, out, *size, *tree, np.int32(lines.book.members), *found,
            scales.view("uint32"), flag,
        )  # fmt: skip
        if value(flag):
            return False
        launch(
            "pack_lines", -(-lines.blocks // THREADS), out, *size, self._vectors, np.int32(lines.bits),
            *found, scales, planes, hinges.view("uint8"), np.int32(lines.hinge_bits // 8),
        )  # fmt: skip
        return True

    def merge(self, buffer: Array, starts: Array, ranks: int, divisor: int, out: Array) -> None:
        """Write the mean; `starts`: the bytes where codes begin."""
        lines = self.lines
        planes, hinges = map(np.int64, lines.offsets)
        launch(
            "merge_lines", -(-lines.entries // THREADS), buffer, starts, np.int32(ranks), planes, hinges,
            np.int64(lines.entries), np.int32(lines.block), self._vectors, np.int32(lines.bits),
            np.int32(lines.hinge_bits // 8), np.float32(divisor), out,
        )  # fmt: skip
