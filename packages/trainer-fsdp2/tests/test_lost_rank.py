"""A rank dies in the middle of a step, and the other one says who."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

WAITS = 120
"""Seconds that a rank waits for another one."""


def test_the_rank_that_is_left_names_the_one_that_died(world: Callable[..., Any]) -> None:
    ranks = world("few", "2, killed")
    assert ranks.codes[1] == -signal.SIGKILL
    seen = ranks.notes[0]["killed"]
    assert seen["error"].startswith("RankFailedError: "), ranks.told
    assert "rank 1 on " in seen["error"]
    assert seen["seconds"] < WAITS
