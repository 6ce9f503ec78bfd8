"""Ranks that report different things draw the same conclusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitopk import errors
from mpitopk.agreement import Report, require_equal, together, verdict
from mpitopk.errors import ConfigError, ExchangeError, GradientError, NonFiniteError

NAN = Report(2, "NonFiniteError", "the gradient has NaN or Inf in segment 'b'")


def test_nan_is_said_of_every_rank_that_has_it() -> None:
    error = verdict([None, NAN, Report(3, "NonFiniteError", "so has mine")])
    assert type(error) is NonFiniteError
    assert "rank 2: the gradient has NaN" in str(error)
    assert "rank 3: so has mine" in str(error)
    assert "before the step" in str(error)


def test_nothing_to_report_means_that_a_sum_overflowed() -> None:
    assert "it is too large" in str(verdict([None, None]))


def test_skipping_is_for_nan_only() -> None:
    assert verdict([None, NAN], "skip") is None
    assert verdict([None, None], "skip") is None
    wrong = Report.of(0, GradientError("expected another size"))
    error = verdict([wrong, NAN], "skip")
    assert type(error) is GradientError
    assert str(error) == "rank 0: expected another size"


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_an_error_of_ours_keeps_its_kind(name: str) -> None:
    kind = getattr(errors, name)
    error = verdict([Report.of(1, kind("text"))])
    if kind is not NonFiniteError:
        assert type(error) is kind
        assert str(error) == "rank 1: text"


@pytest.mark.parametrize("error", [MemoryError("none"), KeyError("x"), np.exceptions.AxisError("y")])
def test_any_other_error_is_named_with_its_rank(error: Exception) -> None:
    result = verdict([None, Report.of(4, error)])
    assert type(result) is ExchangeError
    assert f"rank 4: {type(error).__name__}: " in str(result)


def as_all(others: list[Any]) -> Callable[[Any], list[Any]]:
    """Gather as rank 0 would, with what the other ranks say."""
    return lambda mine: [mine, *others]


def test_together() -> None:
    agreed = together(as_all([(None, "theirs")]), 0, lambda: 7, lambda result: f"mine {result}")
    assert agreed.mine == 7
    assert agreed.every == ["mine 7", "theirs"]
    with pytest.raises(ConfigError, match=r"^rank 1: no$"):
        together(as_all([(Report(1, "ConfigError", "no"), None)]), 0, lambda: 7, str)
    with pytest.raises(ExchangeError, match="rank 0: ZeroDivisionError") as raised:
        together(as_all([(None, "theirs")]), 0, lambda: 1 // 0, str)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_what_must_be_equal() -> None:
    require_equal("they differ", [{"a": 1}, {"a": 1}])
    with pytest.raises(ConfigError, match="they differ: rank 2 has b 3, rank 0 has 2: give every rank"):
        require_equal("they differ", [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}])


def test_the_nearest_word_is_offered() -> None:
    assert errors.nearest("topkk", ["dense", "topk"]) == "did you mean 'topk'?"
    assert errors.nearest("zzz", ["dense", "topk"]) == "known: dense, topk"
