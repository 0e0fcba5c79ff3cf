"""The batches of an optimizer step go through the pipeline in one schedule, and count as one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipe_v",
)
# By scenario: microbatches of each schedule that a step takes.
STEPS = {
    **{name: [12] for name in SCHEDULES},
    "unlike": [8, 4, 4],
    "rounds": [6, 3],
}
EVENTS = ["on_forward_backward_begin", "on_forward_backward_end"]


@pytest.mark.parametrize("name", STEPS)
def test_losses_and_gradients_are_those_of_batches_one_by_one(world: Callable[..., Any], name: str) -> None:
    for seen in world("two", "2").seen(f"step, {name}"):
        together, apart = seen["losses"]
        assert together == pytest.approx(apart, rel=1e-6)
        difference, largest, same_names = seen["gradients"]
        assert same_names
        assert difference <= 1e-6 * largest


@pytest.mark.parametrize("name", STEPS)
def test_batches_of_one_shape_share_a_schedule(world: Callable[..., Any], name: str) -> None:
    for seen in world("two", "2").seen(f"step, {name}"):
        assert seen["microbatches"] == STEPS[name]
        assert seen["fired"] == EVENTS * len(STEPS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_that_of_one_schedule(world: Callable[..., Any], name: str) -> None:
    for seen in world("two", "2").seen(f"step, {name}"):
        assert seen["ran"] == seen["by the table"]


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_synced_after_the_last_microbatch_of_the_step(
    world: Callable[..., Any], name: str
) -> None:
    for seen in world("two", "2").seen(f"step, {name}"):
        calls = [tuple(call) for call in seen["sync"]]
        assert calls[-1] == ("finish", -1, True)
        assert calls.count(("finish", -1, True)) == 1
        for part in {part for _, part, _ in calls} - {-1}:
            own = [(kind, last) for kind, number, last in calls if number == part]
            assert own.pop() == ("after", True)
            assert ("after", True) not in own
            assert [kind for kind, _ in own] == ["before"] * sum(STEPS[name])
            # Where gradients of weights come apart, the last ones are not a backward pass of inputs.
            assert [last for _, last in own[:-1]] == [False] * (len(own) - 1)


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_kept_to_receive_into(world: Callable[..., Any], name: str) -> None:
    for seen in world("two", "2").seen(f"step, {name}"):
        assert len(seen["held"]) >= 12
        assert set(seen["held"]) == {0}


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        ("two", "1f1b"),
        ("two", "zbv"),
        ("four", "replicas"),
        ("four", "pp=4"),
        ("four", "own parameters"),
        pytest.param("four", "pp=2,dp=2", marks=pytest.mark.full),
        pytest.param("four", "pp=2,shard=2", marks=pytest.mark.full),
    ],
)
def test_curve_is_that_of_one_process(world: Callable[..., Any], launch: str, name: str) -> None:
    for seen in world(launch, {"two": "2", "four": "4"}[launch]).seen(f"trained, {name}"):
        here, alone = seen["curves"]
        assert len(here) == 8
        assert here == pytest.approx(alone, rel=1e-5)
