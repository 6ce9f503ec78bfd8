"""One rank's side of the steps, without communication: what both drivers have in common.

A driver calls `begin`, carries out the collective that it returns, hands the result to `resume`,
and so on until that returns None. Where an exchange shows that some rank cannot go on, all ranks
exchange reports (`mpitopk.agreement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpitopk.agreement import Report
from mpitopk.collectives import Allgatherv, Allreduce, Collective
from mpitopk.errors import ConfigError, GradientError, nearest
from mpitopk.schemes.base import Rank, Scheme, Sparse, Steps
from mpitopk.wire import Messages, Status

if TYPE_CHECKING:
    from mpitopk.typing import Array

POLICIES = ("raise", "skip", "zero")


class Participant:
    """A rank with its scheme and state.

    Parameters
    ----------
    rank : Rank
    scheme : Scheme
    nonfinite : {"raise", "skip", "zero"}
        What to do about NaN and Inf: raise `NonFiniteError` on all ranks, skip the step on all
        ranks (its mean is zero), or set the entries to zero, in the gradient, where they are.

    Attributes
    ----------
    failure : Exception or None
        What this rank failed of in the present step.
    """

    def __init__(self, rank: Rank, scheme: Scheme, nonfinite: str) -> None:
        if nonfinite not in POLICIES:
            raise ConfigError(f"nonfinite is {nonfinite!r}: {nearest(str(nonfinite), POLICIES)}")
        if not isinstance(scheme, Scheme):
            raise ConfigError(f"the scheme is {scheme!r}: give an instance, such as TopK(density=0.01)")
        self.rank = rank
        self.scheme = scheme
        self.nonfinite = nonfinite
        self.state = scheme.init(rank)
        self.result: Array | Sparse | None = None
        self._steps: Steps | None = None
        self._gradient: Array | None = None
        self.failure: Exception | None = None

    def begin(self, gradient: object, sparse: bool) -> Collective | None:
        """Start a step and return its first collective; None if this rank fails before that.

        Whatever is wrong with the gradient, or goes wrong in work on it, is kept for the report, and
        the rank goes to the exchange with a stand-in, so that nobody waits for it in vain.
        """
        self.failure = None
        zero, device = self.nonfinite == "zero", self.rank.device
        last, self.result = self.result, None
        try:
            self._gradient = device.gradient(gradient, self.rank.layout, writable=zero)
            if last is not None and device.overlap(self._gradient, _values(last)):
                raise GradientError(
                    "expected a gradient in memory of its own, got the mean of the last step, "
                    "which a step overwrites: make a copy"
                )
            if zero:
                device.zero_nonfinite(self._gradient)
            self._steps = self.scheme.step(self.rank, self.state, self._gradient, sparse)
            return next(self._steps)
        except Exception as error:
            self.failure = error
            return self.scheme.stand_in(self.state)

    def status(self, request: Collective) -> Status:
        """Return how this rank comes to a collective."""
        if self.failure:
            return Status.FAILED
        return Status.FINE if request.finite else Status.NONFINITE

    def sign(self, request: Allgatherv | Allreduce, arrival: int) -> None:
        """Write this rank's header, or mark its values, before they are sent."""
        status = self.status(request)
        if isinstance(request, Allgatherv):
            request.message.sign(status, self.rank.step, arrival)
        elif status is not Status.FINE and request.values.size:
            request.values[0] = np.nan

    def accepts(self, request: Allgatherv, messages: Messages) -> bool:
        """Return whether all ranks can go on; raise `ExchangeError` on a message from elsewhere."""
        return messages.all_fine(request.message)

    def resume(self, result: object) -> Collective | None:
        """Hand over the result of a collective; return the next one, or None at the step's end."""
        assert self._steps is not None
        try:
            return self._steps.send(result)
        except StopIteration as end:
            self.result = end.value
            self.rank.step += 1
            self._steps = self._gradient = None
            return None

    def abandon(self) -> None:
        """End the step without effect."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._gradient = None

    def skipped(self, sparse: bool) -> Array | Sparse:
        """Return the mean of a step that had no effect."""
        layout, device = self.rank.layout, self.rank.device
        self.rank.held = 0
        if sparse:
            self.result = Sparse(device.empty(0, "uint32"), device.empty(0, layout.accumulator))
        else:
            self.result = device.zeros(layout.size, layout.accumulator)
        return self.result

    def report(self) -> Report | None:
        """Return why this rank cannot go on."""
        error = self.failure
        if error is not None:
            return Report.of(self.rank.id, error)
        gradient, device = self._gradient, self.rank.device
        assert gradient is not None
        bad = [s.name for s in self.rank.layout if not device.finite(gradient[s.start : s.stop])]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            text = f"the gradient has NaN or Inf in segment {bad[0]!r}{more}"
        elif not all(device.finite(array) for array in self.state.saved.values()):
            text = "the residual has NaN or Inf, though the gradient has not: load a good state"
        else:
            return None
        return Report(self.rank.id, "NonFiniteError", text)


def _values(mean: Array | Sparse) -> Array:
    return mean.values if isinstance(mean, Sparse) else mean
