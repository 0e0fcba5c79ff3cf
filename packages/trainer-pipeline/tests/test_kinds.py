"""Models of many kinds train as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    "kind",
    [pytest.param("tuples", marks=pytest.mark.full), "tuples, zbv", "twisted", "classes", "called again"],
)
def test_curve_is_that_of_one_process(world: Callable[..., Any], kind: str) -> None:
    for seen in world("two", "2").seen(f"kind, {kind}"):
        here, alone = seen["curves"]
        assert len(here) == 6
        assert here == pytest.approx(alone, rel=1e-5)


def test_patterns_match_names_of_the_whole_model(world: Callable[..., Any]) -> None:
    first, last = world("two", "2").seen("kind, grouped")
    assert first["rates"] == [0.0, 0.01]
    assert last["rates"] == [0.01]


def test_buffers_are_saved_as_the_stage_has_them_that_uses_them(world: Callable[..., Any]) -> None:
    for seen in world("two", "2").seen("kind, counted"):
        # Three steps of four microbatches; other stages call what comes before the blocks as well.
        assert seen == {"before": 12.0, "after": 12.0}


def test_metrics_see_what_the_model_returns(world: Callable[..., Any]) -> None:
    for seen in world("two", "2").seen("kind, scored"):
        here, alone = seen["metrics"]
        assert here == pytest.approx(alone, rel=1e-5)
