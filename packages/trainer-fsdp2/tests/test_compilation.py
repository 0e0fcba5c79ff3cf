"""torch.compile compiles sharded models: something, in the right place, and once for all blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def compiling(world: Callable[..., Any]) -> list[Any]:
    """What each rank compiled."""
    found: list[Any] = world("few", "2").seen("compiling")
    return found


def test_the_model_is_compiled(compiling: list[Any]) -> None:
    for seen in compiling:
        assert seen["model"]["compiled"] == [""]
        assert seen["model"]["graphs"] > 0
        assert seen["model"]["recompiles"] == 0


def test_blocks_are_compiled_once_for_all(compiling: list[Any]) -> None:
    for seen in compiling:
        blocks = seen["blocks"]
        assert blocks["compiled"] == [f"layers.{i}" for i in range(3)]
        # One graph for the whole of a block: what gathers and drops weights does not tear it.
        assert blocks["graphs"] == 1
        assert blocks["recompiles"] == 0


def test_curves_are_those_of_the_model_as_it_is(compiling: list[Any]) -> None:
    for seen in compiling:
        assert seen["model"]["losses"] == pytest.approx(seen["eager"], rel=1e-6)
        assert seen["blocks"]["losses"] == pytest.approx(seen["eager"], rel=1e-6)
