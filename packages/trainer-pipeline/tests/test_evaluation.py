"""Scores and log of a pipeline are those of one process, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

TIMES = {"stage_seconds", "bubble_share"}
PER_STEP = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "input_tokens",
    "total_tokens",
    "epoch",
    "flos",
    "hardware_flos",
)


@pytest.fixture(
    params=[
        ("two", "1f1b"),
        ("two", "interleaved_1f1b"),
        ("four", "zbv"),
        ("four", "replicas"),
        pytest.param(("two", "zbv"), marks=pytest.mark.full),
        pytest.param(("four", "1f1b"), marks=pytest.mark.full),
    ],
    ids=", ".join,
)
def scored(request: pytest.FixtureRequest, world: Callable[..., Any]) -> list[Any]:
    """What each rank saw of a way to train."""
    launch, way = request.param
    found: list[Any] = world(launch, {"two": "2", "four": "4"}[launch]).seen(f"scored, {way}")
    return found


def test_evaluations_are_those_of_one_process(scored: list[Any]) -> None:
    for each in scored:
        # Before training, after it, and of another set with one row too few for the microbatches.
        assert len(each["scores"]) == 3
        for here, alone in zip(each["scores"], each["alone"], strict=True):
            assert here["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
            assert here["eval_tokens"] == alone["eval_tokens"] > 0
            assert here["eval_hits"] == pytest.approx(alone["eval_hits"], rel=1e-5)
            assert here["eval_rows"] == 1, "rows that were filled up are not shown to metrics"
        assert each["scores"][0]["eval_loss"] > each["scores"][1]["eval_loss"]
        _, whole, short = each["scores"]
        named = [each["named"]["eval_whole_loss"], each["named"]["eval_short_loss"]]
        assert named == [whole["eval_loss"], short["eval_loss"]]


def test_curves_are_those_of_one_process(scored: list[Any]) -> None:
    for each in scored:
        here, alone = each["curves"]
        assert len(here) == 6
        assert here == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        ("two", "1f1b"),
        ("four", "zbv"),
        pytest.param("two", "zbv", marks=pytest.mark.full),
        pytest.param("four", "1f1b", marks=pytest.mark.full),
    ],
    indirect=["ranks"],
)
def test_batches_that_the_microbatches_do_not_divide(ranks: Any, schedule: str) -> None:
    for seen in ranks.seen(f"uneven, {schedule}"):
        here, alone = seen["curves"]
        assert len(here) == 12
        assert here == pytest.approx(alone, rel=1e-5)


def test_the_log_is_that_of_one_process(scored: list[Any]) -> None:
    for each in scored:
        steps = [entry for entry in each["log"] if "loss" in entry]
        alone = [entry for entry in each["log alone"] if "loss" in entry]
        for here, there in zip(steps, alone, strict=True):
            for key in PER_STEP:
                assert (key in here) == (key in there), key
                if key in here:
                    assert here[key] == pytest.approx(there[key], rel=1e-5), key


def test_the_log_says_what_stages_waited(scored: list[Any]) -> None:
    steps = [entry for entry in scored[0]["log"] if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert len(entry["stage_seconds"]) == len(scored)
        assert all(0 < seconds < entry["interval_seconds"] for seconds in entry["stage_seconds"])
        assert 0 < entry["bubble_share"] < 1


def test_all_ranks_have_the_same_log(scored: list[Any]) -> None:
    first, *others = scored
    for other in others:
        for mine, theirs in zip(first["log"], other["log"], strict=True):
            assert set(mine) == set(theirs)
            for key in TIMES.union(PER_STEP, ("eval_loss", "eval_hits")) & set(mine):
                assert mine[key] == theirs[key], key
