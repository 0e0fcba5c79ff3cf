"""Scores and log of a pipeline are those of one process, on every rank."""

from __future__ import annotations

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


def runs(ranks: Any) -> list[tuple[str, list[Any]]]:
    """What each rank saw, by way of training."""
    ways = ["scored, 1f1b", "scored, zbv"]
    ways.append("scored, replicas" if len(ranks.codes) == 4 else "scored, interleaved_1f1b")
    return [(way, ranks.seen(way)) for way in ways]


def test_evaluations_are_those_of_one_process(ranks: Any) -> None:
    for way, seen in runs(ranks):
        for each in seen:
            # Before training, after it, and of another set with one row too few for the microbatches.
            assert len(each["scores"]) == 3
            for here, alone in zip(each["scores"], each["alone"], strict=True):
                assert here["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5), way
                assert here["eval_tokens"] == alone["eval_tokens"] > 0, way
                assert here["eval_hits"] == pytest.approx(alone["eval_hits"], rel=1e-5), way
                assert here["eval_rows"] == 1, "rows that were filled up are not shown to metrics"
            assert each["scores"][0]["eval_loss"] > each["scores"][1]["eval_loss"], way
            _, whole, short = each["scores"]
            named = [each["named"]["eval_whole_loss"], each["named"]["eval_short_loss"]]
            assert named == [whole["eval_loss"], short["eval_loss"]], way


def test_curves_are_those_of_one_process(ranks: Any) -> None:
    for way, seen in runs(ranks):
        for each in seen:
            here, alone = each["curves"]
            assert len(here) == 6
            assert here == pytest.approx(alone, rel=1e-5), way


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_batches_that_the_microbatches_do_not_divide(ranks: Any, schedule: str) -> None:
    for seen in ranks.seen(f"uneven, {schedule}"):
        here, alone = seen["curves"]
        assert len(here) == 12
        assert here == pytest.approx(alone, rel=1e-5)


def test_the_log_is_that_of_one_process(ranks: Any) -> None:
    for way, seen in runs(ranks):
        for each in seen:
            steps = [entry for entry in each["log"] if "loss" in entry]
            alone = [entry for entry in each["log alone"] if "loss" in entry]
            for here, there in zip(steps, alone, strict=True):
                for key in PER_STEP:
                    assert (key in here) == (key in there), key
                    if key in here:
                        assert here[key] == pytest.approx(there[key], rel=1e-5), (way, key)


def test_the_log_says_what_stages_waited(ranks: Any) -> None:
    for _, seen in runs(ranks):
        steps = [entry for entry in seen[0]["log"] if "loss" in entry]
        assert len(steps) == 3
        for entry in steps:
            assert len(entry["stage_seconds"]) == len(ranks.codes)
            assert all(0 < seconds < entry["interval_seconds"] for seconds in entry["stage_seconds"])
            assert 0 < entry["bubble_share"] < 1


def test_all_ranks_have_the_same_log(ranks: Any) -> None:
    for way, (first, *others) in runs(ranks):
        for other in others:
            for mine, theirs in zip(first["log"], other["log"], strict=True):
                assert set(mine) == set(theirs), way
                for key in TIMES.union(PER_STEP, ("eval_loss", "eval_hits")) & set(mine):
                    assert mine[key] == theirs[key], (way, key)
