"""QSGD: entries rounded at random to equidistant levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.collectives import Allgatherv
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.quantizer import Codes, Quantizer

if TYPE_CHECKING:
    from mpitopk.typing import Array


def uniform_levels(top: int) -> Array:
    """Return 0, 1 / top, ... 1."""
    levels: Array = np.arange(top + 1, dtype=np.float32) / np.float32(top)
    return levels


class _Uniform(Codes):
    def __init__(self, rank: Rank, scheme: QSGD) -> None:
        super().__init__(rank, scheme, levels=0)
        self.levels = rank.device.from_host(uniform_levels(scheme.top))


@dataclass(frozen=True)
class QSGD(Quantizer):
    """Round every entry at random to one of s = 2**(bits - 1) - 1 equidistant levels, or 0.

    Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS
    2017, section 3.1; with the largest magnitude as scale, as in its experiments. The sign is one of the
    bits: 4 bits are 7 levels. It needs no change of the learning rate.

    Parameters
    ----------
    bits, bucket, norm, seed
        See `Quantizer`. 4 or 8 bits with buckets of 512, and 2 bits with 128, are those of the paper.

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    A rank sends bits n / 8 + 4 n / bucket bytes, and receives that of every other rank: more than a dense
    ring allreduce moves on more than about 64 / bits ranks.

    Examples
    --------
    >>> QSGD(bits=4).top
    7
    """

    about = About("Alistarh et al. 2017", "bits n / 32 words, n / bucket scales", "allgatherv", "n")

    def init(self, rank: Rank) -> _Uniform:
        return _Uniform(rank, self)

    def step(self, rank: Rank, state: _Uniform, gradient: Array, sparse: bool) -> Steps:
        finite = self.encode(rank, state, gradient, state.levels)
        messages = yield Allgatherv(state.message, finite=finite)
        rank.device.merge_codes(messages, state.levels, self.bits, self.bucket, rank.size, state.mean)
        return state.result(sparse=sparse)
