"""Checkpoints: a rank's state as plain arrays, and what becomes of it at another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitopk.errors import StateError

if TYPE_CHECKING:
    from mpitopk.participant import Participant
    from mpitopk.typing import Array

FORMAT = 1
ABOUT = "mpitopk"


def save(participant: Participant) -> dict[str, Array]:
    """Return the state of a rank: a JSON text under `ABOUT`, and copies keyed array/segment."""
    rank = participant.rank
    about = {
        "format": FORMAT,
        "scheme": type(participant.scheme).__name__,
        "step": rank.step,
        "rank": rank.id,
        "size": rank.size,
        "dtype": rank.layout.dtype,
        "segments": [[s.name, s.shape] for s in rank.layout],
        "arrays": sorted(participant.state.saved),
        "shared": sorted(participant.state.shared),
    }
    saved = {ABOUT: np.array(json.dumps(about))}
    for name, array in participant.state.saved.items():
        for segment, view in rank.layout.views(rank.device.mirror(array, name)).items():
            saved[f"{name}/{segment}"] = view.copy()
    for name, array in participant.state.shared.items():
        saved[_shared(name)] = rank.device.mirror(array, name).copy()
    return saved


def saved_size(state: Mapping[str, Array]) -> int:
    """Return how many ranks there were when the state was saved."""
    return int(_about(state)["size"])


def read(participant: Participant, states: Sequence[Mapping[str, Array]]) -> list[dict[str, Any]]:
    """Return what the states say of themselves, or raise `StateError` if one is unusable."""
    abouts = []
    for state in states:
        about = _about(state)
        layout, scheme = participant.rank.layout, type(participant.scheme).__name__
        segments = about["segments"]
        if about["scheme"] != scheme:
            raise StateError(f"the state is of scheme {about['scheme']}, the runtime has {scheme}")
        if segments != [(s.name, s.shape) for s in layout] or about["dtype"] != layout.dtype:
            difference = layout.first_difference(segments, about["dtype"])
            raise StateError(f"the state has another layout: {difference}")
        shared = participant.state.shared
        there, here = about["arrays"] + about["shared"], sorted(participant.state.saved) + sorted(shared)
        if there != here:
            raise StateError(
                f"the state has the arrays {there}, the runtime keeps {here}: "
                "give the scheme the options that it had"
            )
        for name in participant.state.saved:
            for segment in layout:
                _require(state, f"{name}/{segment.name}", segment.shape, layout.accumulator)
        for name, array in shared.items():
            _require(state, _shared(name), array.shape, str(array.dtype))
        about["shared"] = {name: np.array(state[_shared(name)]) for name in shared}
        abouts.append(about)
    return abouts


def agree(every: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what the first state says of itself; raise if one is missing, given twice or of another step."""
    abouts = [about for abouts in every for about in abouts]
    if not abouts:
        raise StateError("no rank was given a state")
    size, step = abouts[0]["size"], abouts[0]["step"]
    for rank, theirs in enumerate(every):
        for about in theirs:
            if (about["size"], about["step"]) != (size, step):
                raise StateError(
                    f"rank {rank} was given a state of step {about['step']} on {about['size']} ranks, others "
                    f"one of step {step} on {size}: give states that were saved together"
                )
    ranks = sorted(about["rank"] for about in abouts)
    if ranks != list(range(len(ranks))) or len(ranks) != size:
        raise StateError(
            f"the states of ranks {ranks} were given, expected each of 0 to {size - 1} once: "
            "rank p of P might load the states p, p + P, p + 2 P, ..."
        )
    return min(abouts, key=lambda about: about["rank"])


def apply(participant: Participant, states: Sequence[Mapping[str, Array]], first: Mapping[str, Any]) -> None:
    """Make the sum of the states the state of a rank; what ranks share is that of the first state."""
    layout, device = participant.rank.layout, participant.rank.device
    for name, array in participant.state.saved.items():
        mirror = device.mirror(array, name)
        for segment, view in layout.views(mirror).items():
            view[...] = 0
            for i, state in enumerate(states):
                saved = np.asarray(state[f"{name}/{segment}"])
                np.copyto(view, saved) if i == 0 else np.add(view, saved, out=view)
        device.restore(array, mirror)
    for name, array in participant.state.shared.items():
        mirror = device.mirror(array, name)
        mirror[...] = first["shared"][name]
        device.restore(array, mirror)
    participant.rank.step = int(first["step"])


def _about(state: Mapping[str, Array]) -> dict[str, Any]:
    try:
        about = json.loads(str(np.asarray(state[ABOUT])))
        known = {"format", "scheme", "step", "rank", "size", "dtype", "segments", "arrays"}
        if not known <= set(about):
            raise StateError(f"the state does not say its {', '.join(sorted(known - set(about)))}")
        about["segments"] = [(name, tuple(shape)) for name, shape in about["segments"]]
        about["arrays"], about["shared"] = list(about["arrays"]), list(about.get("shared", []))
        for name in ("step", "rank", "size"):
            if not isinstance(about[name], int) or about[name] < 0:
                raise StateError(f"the state has {name} {about[name]!r}, expected a whole number from 0")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"this is no state of mpitopk: no readable entry {ABOUT!r} ({error})") from None
    if about["format"] != FORMAT:
        raise StateError(
            f"the state has format {about['format']}, expected {FORMAT}: use the version that saved it"
        )
    return about  # type: ignore[no-any-return]


def _shared(name: str) -> str:
    return f"shared/{name}"


def _require(state: Mapping[str, Array], key: str, shape: tuple[int, ...], dtype: str) -> None:
    if key not in state:
        raise StateError(f"the state lacks {key!r}")
    array = np.asarray(state[key])
    if array.shape != shape or array.dtype != dtype:
        raise StateError(f"{key!r} is {array.dtype} {array.shape}, expected {dtype} {shape}")
    if not np.isfinite(array).all():
        raise StateError(f"{key!r} has NaN or Inf")
