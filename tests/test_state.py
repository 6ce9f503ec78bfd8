"""Saved states that are damaged, foreign or incomplete are refused, and nothing changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from worlds import LAYOUT, Array, whole

from mpitopk import Dense, Layout, RandomK, Scheme, Simulation, TopK, saved_size
from mpitopk.errors import StateError

State = dict[str, Array]


def saved(size: int = 2, scheme: Scheme | None = None, layout: Layout = LAYOUT) -> list[State]:
    simulation = Simulation(size, layout, scheme or TopK(0.1))
    for step in range(2):
        simulation.allreduce(whole(size, step, layout, layout.storage))
    return simulation.state_dicts()


def about(state: State, **changes: Any) -> State:
    return state | {"mpitopk": np.array(json.dumps(json.loads(str(state["mpitopk"])) | changes))}


def refused(states: Any, match: str, scheme: Scheme | None = None) -> None:
    simulation = Simulation(2, LAYOUT, scheme or TopK(0.1))
    simulation.allreduce(whole(2, 5))
    before = simulation.state_dicts()
    with pytest.raises(StateError, match=match):
        simulation.load_state_dicts(states)
    for a, b in zip(before, simulation.state_dicts(), strict=True):
        assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    simulation.allreduce(whole(2, 6))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": "soon"}, "step 'soon', expected a whole number"),
        ({"step": -1}, "step -1"),
        ({"step": 1.5}, r"step 1\.5"),
        ({"rank": None}, "rank None"),
        ({"rank": 7}, r"ranks \[1, 7\] were given"),
        ({"size": 10**15}, "others one of step"),
        ({"size": "two"}, "size 'two'"),
        ({"segments": 5}, "no state of mpitopk"),
        ({"segments": [["w", [12]]]}, "another layout"),
        ({"dtype": "float64"}, "another layout: dtype float64 instead of float32"),
        ({"format": 2}, "format 2, expected 1"),
        ({"scheme": "Dense"}, "scheme Dense"),
        ({"arrays": []}, "arrays"),
    ],
)
def test_what_a_state_says_of_itself_is_checked(changes: Any, match: str) -> None:
    states = saved()
    refused([about(states[0], **changes), states[1]], match)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"mpitopk"', "{}"])
def test_no_readable_text(text: str) -> None:
    states = saved()
    refused([states[0] | {"mpitopk": np.array(text)}, states[1]], "state")
    with pytest.raises(StateError):
        saved_size({"mpitopk": np.array(text)})


@pytest.mark.parametrize("state", [None, 3, "path.npz", [], {}])
def test_what_is_no_state_at_all(state: Any) -> None:
    refused([state, state], "no state of mpitopk")


def test_missing_twice_and_from_different_runs() -> None:
    states, larger = saved(), saved(3)
    refused([], "no rank was given a state")
    refused(states[:1], r"ranks \[0\] were given, expected each of 0 to 1 once")
    refused([states[1], states[1]], r"ranks \[1, 1\]")
    refused([states[0], larger[1]], "saved together")
    refused([states[0], about(states[1], step=9)], "step 9 on 2 ranks, others one of step 2 on 2")
    refused([*larger, larger[0]], "ranks")
    all_huge = [about(state, size=10**15) for state in states]
    refused(all_huge, "expected each of 0 to 999999999999999 once")


def test_arrays_that_do_not_fit() -> None:
    states, key = saved(), "residual/w"
    for wrong, match in {
        "float64": (states[0][key].astype(np.float64), "float64"),
        "shape": (states[0][key].reshape(-1), r"\(120,\), expected float32 \(12, 10\)"),
        "bytes": (states[0][key].astype(">f4"), "expected float32"),
        "nan": (np.full_like(states[0][key], np.nan), "NaN or Inf"),
    }.values():
        refused([states[0] | {key: wrong}, states[1]], match)
    refused([{k: v for k, v in states[0].items() if k != key}, states[1]], "lacks 'residual/w'")


def test_a_residual_is_not_dropped_in_silence() -> None:
    """By a scheme that keeps none."""
    refused(saved(2, RandomK(0.1)), "arrays", RandomK(0.1, feedback=False))
    refused(saved(2, RandomK(0.1, feedback=False)), "arrays", RandomK(0.1))
    simulation = Simulation(2, LAYOUT, Dense())
    simulation.load_state_dicts(saved(3, Dense()))
    assert simulation.participants[0].rank.step == 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_states_are_plain_copies(dtype: str) -> None:
    layout = Layout({"a": (2, 3), "b/c": 5, "empty": 0, "scalar": ()}, dtype=dtype)
    simulation = Simulation(2, layout, TopK(0.3))
    simulation.allreduce(np.ones((2, layout.size), layout.storage))
    (state, _) = simulation.state_dicts()
    assert set(state) == {"mpitopk", "residual/a", "residual/b/c", "residual/empty", "residual/scalar"}
    assert {str(v.dtype) for k, v in state.items() if "/" in k} == {layout.accumulator}
    before = state["residual/a"].copy()
    simulation.allreduce(np.ones((2, layout.size), layout.storage))
    assert state["residual/a"].tobytes() == before.tobytes()
    other = Simulation(2, layout, TopK(0.3))
    other.load_state_dicts(simulation.state_dicts())
    for name, view in layout.views(other.residuals[1]["residual"]).items():
        assert view.tobytes() == simulation.state_dicts()[1][f"residual/{name}"].tobytes()
