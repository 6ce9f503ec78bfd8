"""What can go wrong, by whose fault it is. Each message says what was expected, what was given, on
which rank, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpiTopkError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MpiTopkError, ValueError):
    """An option is out of range or unknown, or the ranks were configured differently."""


class LayoutError(MpiTopkError, ValueError):
    """A layout is malformed, or an array does not fit it."""


class GradientError(MpiTopkError, ValueError):
    """The array given as gradient (or parameters) cannot be used."""


class NonFiniteError(MpiTopkError, ArithmeticError):
    """A gradient, or what it was accumulated to, has a NaN or Inf. The state is as before the step."""


class ExchangeError(MpiTopkError, RuntimeError):
    """The ranks do not follow one another, or a message is not one of ours."""


class ReplicaError(MpiTopkError, RuntimeError):
    """Arrays that must be the same on all ranks differ."""


class StateError(MpiTopkError, ValueError):
    """A saved state is corrupt, incomplete or belongs to something else."""


class DeviceError(MpiTopkError, RuntimeError):
    """The device asked for cannot be used here."""


class ClosedError(MpiTopkError, RuntimeError):
    """A runtime was used after it was closed."""


class CompressionWarning(UserWarning):
    """The configuration works but cannot pay."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a remedy for a misspelt word: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
