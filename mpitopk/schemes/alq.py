"""ALQ and AMQ: entries rounded at random to levels that adapt to the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.collectives import Allgatherv, Allreduce
from mpitopk.errors import ConfigError, nearest
from mpitopk.levels import adapted, fitted, powers
from mpitopk.schemes.base import About, Rank, Steps
from mpitopk.schemes.qsgd import uniform_levels
from mpitopk.schemes.quantizer import Codes, Quantizer

if TYPE_CHECKING:
    from mpitopk.typing import Array

FORMS = ("alq", "alq-gradient", "amq")
STARTS = ("exponential", "uniform")
FITS = ("histogram", "normal")
BINS = 194


class Adaptive(Codes):
    """Levels, and what they are adapted by."""

    def __init__(self, rank: Rank, scheme: ALQ) -> None:
        super().__init__(rank, scheme, levels=scheme.top + 1)
        exponential = np.array(powers(0.5, scheme.top), np.float32)
        start = exponential if scheme.start == "exponential" else uniform_levels(scheme.top)
        self.levels = rank.device.from_host(start)
        self.next_levels = rank.device.from_host(start.copy())
        self.counts = rank.device.zeros(BINS, rank.layout.accumulator)
        self._scheme = scheme

    @property
    def shared(self) -> dict[str, Array]:
        return {"levels": self.levels}

    @property
    def adapts(self) -> bool:
        """Whether the levels change in this step."""
        return self._scheme.updates(self._rank.step)

    def count(self, gradient: Array) -> bool:
        """Write to `counts` how large the ratios are; return whether the gradient is finite."""
        device, scheme = self._rank.device, self._scheme
        found = device.count_ratios(gradient, scheme.bucket, scheme.norm == "max")
        mirror = device.mirror(self.counts, "counts")
        mirror[:] = found
        device.restore(self.counts, mirror)
        return not found[-1]

    def adapt(self) -> None:
        """Set `next_levels` by `counts`; they stay what they are where the counts say nothing."""
        device, scheme = self._rank.device, self._scheme
        counts = device.mirror(self.counts, "counts").astype(np.float64)
        density = fitted(counts.tolist(), scheme.fit == "normal")
        if density is not None:
            last = device.mirror(self.levels, "levels").astype(np.float64)
            mirror = device.mirror(self.next_levels, "levels")
            mirror[:] = adapted(density, last.tolist(), scheme.form)
            device.restore(self.next_levels, mirror)

    def commit(self) -> None:
        """Keep the levels that were used."""
        if self.adapts:
            self.levels, self.next_levels = self.next_levels, self.levels


@dataclass(frozen=True)
class ALQ(Quantizer):
    """Round every entry at random to levels that make the expected variance least.

    Faghri et al., "Adaptive gradient quantization for data-parallel SGD", NeurIPS 2020, arXiv 2010.12460.
    At some steps the ranks count the ratios of magnitudes and scales, average the counts, and set the
    levels by them; the same ones on all ranks, and each message carries those that it means. Levels are
    of magnitude and 0 is one of them, as in the paper; its code has none.

    Parameters
    ----------
    bits, bucket, norm, seed
        See `Quantizer`.
    form : {"alq", "alq-gradient", "amq"}
        All levels by coordinate descent, or by gradient steps; or the powers of a multiplier, with 0.
    fit : {"histogram", "normal"}
        The density of the ratios: that which was counted, or the normal distribution with its mean and
        standard deviation, as in the paper. That one knows nothing of rare large entries.
    start : {"exponential", "uniform"}
        The levels before the first adaption: powers of 1/2, or those of `QSGD`.
    update_steps : tuple of int
        Steps, from 0, in which levels are adapted.
    update_every : int
        They also are in every step that is a multiple of this, but 0; 0 for never. With no update at all
        and the exponential start this is NUQSGD (Ramezani-Kebrya et al. 2021).

    Raises
    ------
    ConfigError
        If an option is out of range.

    Notes
    -----
    A rank sends bits n / 8 + 4 n / bucket bytes and 2**(bits - 1) levels; an allreduce of 194 numbers
    precedes it in steps that adapt.
    """

    about = About(
        "Faghri et al. 2020", "bits n / 32 words, n / bucket scales", "allgatherv; seldom allreduce", "n"
    )

    bits: int = 3
    bucket: int = 8192
    norm: str = "l2"
    form: str = "alq"
    fit: str = "histogram"
    start: str = "exponential"
    update_steps: tuple[int, ...] = (100, 2000)
    update_every: int = 10000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("form", FORMS), ("fit", FITS), ("start", STARTS)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value!r}: {nearest(str(value), known)}")
        steps = self.update_steps
        if not isinstance(steps, tuple) or not all(type(step) is int and step >= 0 for step in steps):
            raise ConfigError(f"update_steps is {steps!r}: give a tuple of whole numbers from 0")
        if type(self.update_every) is not int or self.update_every < 0:
            raise ConfigError(f"update_every is {self.update_every!r}: give a whole number from 0")

    def updates(self, step: int) -> bool:
        """Return whether the levels are adapted in a step."""
        periodic = self.update_every > 0 and step > 0 and step % self.update_every == 0
        return periodic or step in self.update_steps

    def init(self, rank: Rank) -> Adaptive:
        return Adaptive(rank, self)

    def stand_in(self, state: Adaptive) -> Allgatherv | Allreduce:  # type: ignore[override]
        return Allreduce(state.counts, state.counts) if state.adapts else Allgatherv(state.message)

    def step(self, rank: Rank, state: Adaptive, gradient: Array, sparse: bool) -> Steps:
        levels = state.levels
        if state.adapts:
            finite = state.count(gradient)
            yield Allreduce(state.counts, state.counts, finite=finite)
            state.adapt()
            levels = state.next_levels
        finite = self.encode(rank, state, gradient, levels)
        state.levels_sent[:] = levels
        messages = yield Allgatherv(state.message, finite=finite)
        rank.device.merge_codes(messages, None, self.bits, self.bucket, rank.size, state.mean)
        state.commit()
        return state.result(sparse=sparse)
