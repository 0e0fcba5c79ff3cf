"""Models of which a part is not trained: nothing of it moves, and everything before it still learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RUNS = [
    ("frozen_embedding", "1f1b"),
    ("frozen_embedding", "zbv"),
    ("frozen_beginning", "zbv"),
    ("frozen_end", "interleaved_1f1b"),
]
MORE = [
    ("frozen_embedding", "gpipe"),
    ("frozen_embedding", "interleaved_1f1b"),
    ("frozen_beginning", "interleaved_1f1b"),
    ("frozen_end", "zbv"),
]


@pytest.mark.parametrize(
    ("what", "schedule"), [*RUNS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_curve_is_that_of_one_process(world: Callable[..., Any], what: str, schedule: str) -> None:
    ranks = world("two", "2").seen(f"{what}, {schedule}")
    assert any(seen["frozen"] for seen in ranks)
    for seen in ranks:
        here, alone = seen["curves"]
        assert len(here) == 6
        assert here == pytest.approx(alone, rel=1e-5)
        assert seen["differing"] == []
        assert seen["moved"] == []
