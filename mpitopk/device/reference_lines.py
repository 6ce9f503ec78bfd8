"""The operations on blocks and lines in plain NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpitopk.device.arrays import HostMemoryDevice, sound, widen
from mpitopk.wire import Message

if TYPE_CHECKING:
    from mpitopk.codebook import Codebook
    from mpitopk.lines import Lines
    from mpitopk.typing import Array
    from mpitopk.wire import Messages


def blocks_of(x: Array, lines: Lines) -> Array:
    """Return the blocks of a buffer, a row for each, padded with zeros."""
    return np.append(x, np.zeros(-x.size % lines.block, x.dtype)).reshape(-1, lines.block)


def searched(rows: Array, book: Codebook) -> tuple[Array, Array]:
    """Return the number of the line of each row, and the product with its vector."""
    of_branch, _ = nearest(rows, book.representatives[None])
    vectors = book.vectors.reshape(-1, book.members, book.block)
    of_members, products = nearest(rows, vectors[of_branch])
    return of_branch * book.members + of_members, products


def nearest(rows: Array, vectors: Array) -> tuple[Array, Array]:
    """Return which of its vectors, or of all rows' vectors, is nearest to each row, and the product."""
    products = np.zeros((len(rows), vectors.shape[1]), rows.dtype)
    for j in range(rows.shape[1]):
        products += rows[:, j : j + 1] * vectors[:, :, j].astype(rows.dtype)
    numbers = np.abs(products).argmax(axis=1)
    return numbers, products[np.arange(len(rows)), numbers]


def decoded(words: Array, lines: Lines) -> Array:
    """Return what the words of code stand for: as many entries as there are."""
    scales, planes, hinges = lines.parts(words)
    bits = np.unpackbits(
        planes.reshape(lines.chunks, lines.bits, 1).view(np.uint8), axis=2, bitorder="little"
    )
    numbers = (
        (bits.astype(np.int64) << np.arange(lines.bits)[:, None]).sum(axis=1).reshape(-1)[: lines.blocks]
    )
    steps = np.repeat(scales / scales.dtype.type(lines.most), lines.group)[: lines.blocks]
    coefficients = hinges.astype(scales.dtype) * steps
    values: Array = coefficients[:, None] * lines.book.vectors[numbers].astype(scales.dtype)
    return values.reshape(-1)[: lines.entries]


class ReferenceLines(HostMemoryDevice):
    """Blocks and lines in host memory, in NumPy."""

    def encode_lines(self, gradient: Array, residual: Array, out: Array, lines: Lines, words: Array) -> bool:
        words[:] = 0
        scales, planes, hinges = lines.parts(words)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(residual, widen(gradient, str(out.dtype)), out=out)
            if not sound(out):
                return False
            numbers = np.zeros(32 * lines.chunks, np.int64)
            rows = blocks_of(out, lines)
            for group in range(lines.groups):
                here = slice(group * lines.group, min((group + 1) * lines.group, lines.blocks))
                numbers[here], products = searched(rows[here], lines.book)
                scales[group] = scale = np.abs(products).max()
                if scale > 0:
                    hinges[here] = np.rint(products / scale * out.dtype.type(lines.most))
            bits = numbers.reshape(-1, 1, 32) >> np.arange(lines.bits)[:, None] & 1
            planes[:] = np.packbits(bits.astype(np.uint8), axis=2, bitorder="little").reshape(-1).view("<u4")
            out -= decoded(words, lines)
        return True

    def merge_lines(self, messages: Messages, lines: Lines, divisor: int, out: Array) -> None:
        out.fill(0)
        with np.errstate(over="ignore", invalid="ignore"):
            for at in messages.starts:
                out += decoded(Message.parse(messages.buffer[at:], lines.words, 0, None).indices, lines)
            out /= divisor
