"""Selection on a GPU: the kernels of select.cu and full.cu in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy
import numpy as np

from mpitopk.device.hashing import FEISTEL_ROUNDS, splitmix64
from mpitopk.device.launch import GRADIENTS, THREADS, Array, allocate, clear, launch, processors
from mpitopk.device.tiles import TILE, capacity, cut

if TYPE_CHECKING:
    from mpitopk.plan import Plan

assert TILE == THREADS * 16
WARPS = THREADS // 32
BINS, LIST = 4096, 1024
STATE, GATHERED, FOUND, LISTED, STATUS = 40, 16, 20, 8, 12
"""Bytes of the structures in select.cuh."""
DIGITS = ((19, 12), (7, 12), (0, 7))
"""Shift and bits of each digit of a magnitude, the highest first."""


class Selector:
    """Selection for one plan: its tiles, and room for what is found on the way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        tiles, groups = cut(plan)
        self.tiles, self.sparse, self.groups = len(tiles), int((tiles["group"] >= 0).sum()), len(groups)
        self.size = int(groups["size"].sum())
        self.capacity = capacity(groups)
        self._tiles, self._groups = (
            cupy.asarray(x.view(np.uint8)) if x.size else None for x in (tiles, groups)
        )
        self._warps = -(-self.sparse // WARPS)
        self._per_block = max(1, -(-self.sparse // (4 * processors())))

        def room(nbytes: int) -> Array:
            return allocate(max(1, nbytes), "uint8")

        self._states = room(STATE * self.groups)
        clear(self._states)
        self._status = room(STATUS).view("uint32")
        self._gathered, self._found = room(GATHERED * self.groups), room(FOUND * self.sparse)
        self._histograms, self._lists = room(4 * BINS * self.groups), room(LISTED * LIST * self.groups)
        self._candidates, self._values = room(4 * self.capacity), room(4 * self.capacity)

    def run(
        self, gradient: Array, residual: Array | None, out: Array | None, indices: Array, values: Array
    ) -> tuple[bool, int]:
        """Return whether all is finite, and how many groups had to be selected without a window."""
        kind = GRADIENTS[str(gradient.dtype)]
        tiles, groups, found, states = self._tiles, self._groups, self._found, self._states
        gathered, status, histograms, lists = self._gathered, self._status, self._histograms, self._lists
        candidates = self._candidates, self._values
        n_tiles, n_groups, room = np.int32(self.sparse), np.int32(self.groups), np.uint32(self.capacity)
        per_block, blocks = np.int32(self._per_block), -(-self.sparse // self._per_block)
        x = gradient, residual
        launch(
            f"window<{kind}>", max(1, self.groups), *x, tiles, groups, n_groups, states, gathered, status,
            histograms, threads=1024,
        )  # fmt: skip
        launch(
            f"scan<{kind}>", self.tiles, *x, out, tiles, found, states, status, histograms, *candidates, room
        )
        launch(
            "refine", blocks, tiles, groups, found, states, gathered, status, histograms, self._values, lists,
            n_tiles, per_block,
        )  # fmt: skip
        launch("emit", self._warps, tiles, found, states, status, *candidates, out, indices, values, n_tiles)
        _, nonfinite, missed = cupy.asnumpy(status).tolist()
        if nonfinite:
            return False, 0
        if missed:
            self._select_fully(gradient if out is None else out, out is not None, indices, values)
        return True, missed

    def _select_fully(self, x: Array, accumulated: bool, indices: Array, values: Array) -> None:
        tiles, found, states = self._tiles, self._found, self._states
        histograms, n_tiles = self._histograms, np.int32(self.sparse)
        if accumulated:
            launch("restore", self._warps, tiles, found, states, self._candidates, self._values, x, n_tiles)
        for shift, bits in DIGITS:
            launch("digit", self.sparse, x, tiles, states, histograms, np.uint32(shift), np.uint32(bits))
            launch("pick", self.groups, states, histograms, np.uint32(shift))
        launch("tally", self.sparse, x, tiles, found, states)
        launch("settle", self.groups, self._groups, found, states)
        launch(
            "gather", self._warps, x, tiles, found, states, indices, values, n_tiles, np.int32(accumulated)
        )

    def move_above(self, x: Array, threshold: float, least: int, indices: Array, values: Array) -> int:
        """Return how many entries have at least that magnitude; move them unless they are few or many."""
        most = indices.size
        if self._candidates.nbytes < 4 * most:
            self._candidates, self._values = (allocate(4 * most, "uint8") for _ in range(2))
        with np.errstate(over="ignore"):
            low = np.float32(threshold).view(np.uint32)
        tiles, found, states, status = self._tiles, self._found, self._states, self._status
        candidates, n_tiles = (self._candidates, self._values), np.int32(self.sparse)
        launch("aim", max(1, -(-self.groups // THREADS)), states, status, np.int32(self.groups), low)
        launch(
            "scan<float>", self.sparse, x, None, None, tiles, found, states, status, self._histograms,
            *candidates, np.uint32(most),
        )  # fmt: skip
        bounds = np.uint32(least), np.uint32(most)
        launch("place", 1, found, states, status, n_tiles, np.int32(self.groups), *bounds, threads=1024)
        launch("emit", self._warps, tiles, found, states, status, *candidates, x, indices, values, n_tiles)
        return int(cupy.asnumpy(status)[0])

    def chunk_maxima(self, x: Array, chunk: int, indices: Array) -> None:
        """Write where the largest magnitude of each chunk is."""
        total = indices.size
        launch(
            "chunk_maxima", -(-total // WARPS), x, self._tiles, self._groups, np.int32(self.groups),
            np.uint32(total), np.int64(chunk), indices,
        )  # fmt: skip

    def sample(self, x: Array, key: int, out: Array) -> None:
        """Copy an entry of each of as many equal parts as `out` is long."""
        m, n = np.uint64(out.size), np.uint64(self.size)
        launch(
            "sample_group", -(-out.size // THREADS), x, self._tiles, np.int32(self.sparse), n, m,
            np.uint64(key), out,
        )  # fmt: skip

    def draw(self, key: int, out: Array) -> None:
        """Write random indices of each group."""
        mixed = [splitmix64((key + group) % (1 << 64)) for group in range(self.groups)]
        words = [splitmix64(m + r) & 0xFFFFFFFF for m in mixed for r in range(FEISTEL_ROUNDS)]
        keys = cupy.asarray(np.array([*words, 0], np.uint32))
        tiles, groups, found = self._tiles, self._groups, self._found
        launch("draw", self.sparse, tiles, groups, keys, found)
        launch("settle_drawn", self.groups, groups, found)
        launch("gather_drawn", self._warps, tiles, groups, keys, found, out, np.int32(self.sparse))
