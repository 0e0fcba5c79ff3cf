"""Ranks that share out sequences shard the weights, count each token once, and score whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_curve_counts_and_metrics_are_those_of_one_process(world: Callable[..., Any]) -> None:
    for seen in world("few", "2").seen("divided sequences"):
        assert len(seen) == 2, seen
        here, alone = seen
        for mine, other in zip(here["curve"], alone["curve"], strict=True):
            assert mine == pytest.approx(other, rel=1e-6)
        assert here["tokens"] == alone["tokens"]
        assert here["scored"] == pytest.approx(alone["scored"], rel=1e-6)
        assert here["scored"][1] == 7 * 5


def test_a_model_that_attends_by_itself_is_refused_on_every_rank(world: Callable[..., Any]) -> None:
    for seen in world("few", "2").seen("sequences that cannot be divided"):
        assert "mesh='cp=2' cannot be used with this model: Sequences of Tiny cannot be divided" in seen
