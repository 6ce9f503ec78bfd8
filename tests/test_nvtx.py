"""NVTX as a profiler sees it, by a library that NVTX loads as it would Nsight Systems."""

from __future__ import annotations

from collections import Counter

import pytest
from recordings import Call, needs_gcc, slow_rank

pytestmark = needs_gcc
STEPS = 3
PHASES = {
    "topk": ["select", "pack", "exchange", "merge"],
    "dense": ["exchange", "merge"],
    "qsgd": ["pack", "exchange", "merge"],
}


@pytest.fixture(scope="module", params=PHASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Call]]:
    """What is seen of rank 0 of two."""
    scheme = request.param
    _, seen = slow_rank(tmp_path_factory.mktemp(scheme), scheme, STEPS, ranks=2)
    return scheme, seen[0]


def test_ranges_are_in_our_domain_and_balanced(run: tuple[str, list[Call]]) -> None:
    _, seen = run
    assert {call.domain for call in seen} == {"mpitopk"}
    depth = 0
    for call in seen:
        depth += 1 if call.push else -1
        assert depth in (0, 1, 2)
    assert depth == 0
    assert [call.time for call in seen] == sorted(call.time for call in seen)


def test_phases_lie_within_the_ranges_of_the_user(run: tuple[str, list[Call]]) -> None:
    """In the program each step is a forward, and an update that holds the exchange."""
    scheme, seen = run
    stack: list[str] = []
    found: list[str] = []
    for call in seen:
        if call.push:
            stack.append(call.text)
            found.append("/".join(stack))
        else:
            stack.pop()
    one = ["forward", "update", *(f"update/{phase}" for phase in PHASES[scheme])]
    recording = "update/recording"
    assert [name for name in found if name != recording] == one * STEPS
    assert found.count(recording) == (1 if scheme == "topk" else 0), "the norm of the residual, at step 0"


def test_payloads_are_the_step(run: tuple[str, list[Call]]) -> None:
    """What belongs to a step: until the next exchange, what the program does before it too."""
    _, seen = run
    steps = Counter(call.payload for call in seen if call.push and call.text in ("forward", "exchange"))
    assert steps == dict.fromkeys(range(STEPS), 2)


def test_names_are_registered_and_have_categories(run: tuple[str, list[Call]]) -> None:
    """Capture by name in Nsight Systems sees registered strings only."""
    _, seen = run
    for call in seen:
        if call.push:
            assert call.registered
            mine = call.text not in ("forward", "update", "recording")
            assert call.category == ("phase" if mine else "user")
