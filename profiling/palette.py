"""Colours of phases, which people with any kind of colour vision can tell apart (Okabe & Ito 2008)."""

from __future__ import annotations

PHASES = {
    "accumulate": "#56b4e9",
    "select": "#009e73",
    "pack": "#f0e442",
    "wait": "#d55e00",
    "transfer": "#e69f00",
    "exchange": "#8c6d31",
    "merge": "#cc79a7",
    "other": "#c4c8cc",
}
OF_THE_USER = ("#0072b2", "#7fb2d6", "#4b5563", "#9aa5b1")
"""Of ranges of the user's own code, in turns."""


def colours(phases: list[str]) -> dict[str, str]:
    """Return the colour of each phase."""
    own = [phase for phase in phases if phase not in PHASES]
    theirs = {phase: OF_THE_USER[at % len(OF_THE_USER)] for at, phase in enumerate(own)}
    return {phase: PHASES.get(phase) or theirs[phase] for phase in phases}
