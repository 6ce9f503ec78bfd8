"""Ranks fail together: each reports, and all draw the same conclusion from the reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpitopk import errors
from mpitopk.errors import ConfigError, ExchangeError, MpiTopkError, NonFiniteError

Result = TypeVar("Result")
Gather = Callable[[Any], list[Any]]
"""Takes this rank's (small) object and returns those of all ranks, in rank order, everywhere."""


@dataclass(frozen=True)
class Report:
    """Why a rank cannot go on."""

    rank: int
    error: str
    text: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> Report:
        """Return the report of a rank on its exception."""
        return cls(rank, type(error).__name__, str(error))


def verdict(reports: list[Report | None], nonfinite: str = "raise") -> MpiTopkError | None:
    """Return the error that every rank raises, or None if the step is to be skipped."""
    given = [report for report in reports if report]
    failed = [report for report in given if report.error != "NonFiniteError"]
    if failed:
        kind = getattr(errors, failed[0].error, None)
        if kind is not None:
            return kind("; ".join(f"rank {r.rank}: {r.text}" for r in failed))  # type: ignore[no-any-return]
        return ExchangeError("; ".join(f"rank {r.rank}: {r.error}: {r.text}" for r in failed))
    if nonfinite == "skip":
        return None
    text = (
        "; ".join(f"rank {r.rank}: {r.text}" for r in given)
        or "every gradient is finite, but with the residual, or added up over the ranks, it is too large"
    )
    return NonFiniteError(
        f"{text}; the residual is as before the step: "
        'lower the learning rate or clip, or let the runtime go on with nonfinite="skip" or "zero"'
    )


@dataclass(frozen=True)
class Together(Generic[Result]):
    """What a function returned on this rank, and the objects to compare of all ranks."""

    mine: Result
    every: list[Any]


def together(
    gather: Gather, rank: int, function: Callable[[], Result], shared: Callable[[Result], Any]
) -> Together[Result]:
    """Call a function on all ranks; if it fails on some, raise the same error on all.

    `shared` picks what the other ranks need to know of the result.
    """
    failure = report = mine = compared = None
    try:
        mine = function()
        compared = shared(mine)
    except Exception as error:
        failure, report = error, Report.of(rank, error)
    every = gather((report, compared))
    reports = [r for r, _ in every]
    if any(reports):
        raise verdict(reports) or AssertionError from failure
    assert mine is not None
    return Together(mine, [object_ for _, object_ in every])


def require_equal(what: str, options: list[dict[str, Any]]) -> None:
    """Raise `ConfigError` if the options of a rank differ from those of rank 0."""
    for rank, theirs in enumerate(options):
        for name, value in theirs.items():
            if value != options[0][name]:
                raise ConfigError(
                    f"{what}: rank {rank} has {name} {value}, rank 0 has {options[0][name]}: "
                    "give every rank the same"
                )
