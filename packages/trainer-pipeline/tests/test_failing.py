"""A stage raises, or a rank dies: every rank ends at once, and says whose fault it is."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

WAITS = 120
"""Seconds that ranks wait for one another."""
DOING = ("training", "evaluating", "generating")
ERROR = "StageError: the 7th call of this block is one too many"
OF_TORCH = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"


def check(ended: Any, failed: int, error: str, doing: str) -> None:
    """Whether every rank has told what happened, soon, and has ended with an error."""
    began = (ended.folder / "failed").stat().st_mtime
    assert ended.ended - began < WAITS
    for rank, seen in enumerate(ended.seen("failing")):
        assert seen["time"] - began < WAITS
        if rank == failed:
            assert seen["error"] == error
            # The place in the model, not only in what runs it.
            assert "self.do()" in seen["told"]
        else:
            assert seen["error"].startswith(f"RankFailedError: {doing}: rank {failed} on "), ended.told
            assert error in seen["error"]
    assert ended.codes == [1] * len(ended.codes)


@pytest.mark.parametrize(
    ("count", "doing"),
    [
        *((2, doing) for doing in DOING),
        (4, "training"),
        *(pytest.param(4, doing, marks=pytest.mark.full) for doing in DOING[1:]),
    ],
)
def test_every_rank_ends_with_the_error_of_the_stage(
    world: Callable[..., Any], count: int, doing: str
) -> None:
    check(world("failing", f"{count}, {doing}"), count - 1, ERROR, doing)


def test_an_error_of_torch_is_not_taken_for_a_lost_connection(world: Callable[..., Any]) -> None:
    check(world("failing", "2, shapes"), 1, OF_TORCH, "training")


def test_a_schedule_of_several_stages(world: Callable[..., Any]) -> None:
    # Rank 0 has the first and the last stage.
    check(world("failing", "2, zbv"), 0, ERROR, "training")


@pytest.mark.parametrize(("name", "stage"), {"2, training": 1, "4, training": 3, "2, zbv": 3}.items())
def test_the_error_in_training_says_stage_and_microbatch(
    world: Callable[..., Any], name: str, stage: int
) -> None:
    told = "".join(seen["told"] for seen in world("failing", name).seen("failing"))
    assert re.search(rf"^in stage {stage}, microbatch [12]$", told, flags=re.MULTILINE), told


def test_a_rank_that_dies_is_named(world: Callable[..., Any]) -> None:
    ended = world("failing", "4, killed")
    began = (ended.folder / "failed").stat().st_mtime
    assert ended.codes == [1, 1, -signal.SIGKILL, 1]
    assert ended.ended - began < WAITS
    for rank in (0, 1, 3):
        error = ended.notes[rank]["failing"]["error"]
        assert error.startswith("RankFailedError: training: rank 2 on "), ended.told
