"""Evaluation by several ranks gives the figures of one process, and scores every example once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WAYS = ("dispatched", "own", "lopsided")
ROWS = (3, 4, 8, 10, 13)
"""Examples in the first 1 to 5 batches."""


@pytest.fixture(scope="module")
def job(launch: Callable[..., Any]) -> Any:
    """Four ranks that evaluate together, and then two of them."""
    done = launch("evaluating.py", 4, timeout=400)
    assert [process.code for process in done.processes] == [0] * 4, done.told
    return done


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def notes(request: pytest.FixtureRequest, job: Any) -> list[dict[str, Any]]:
    """What each rank found."""
    return [each[str(request.param)] for each in job.notes[: request.param]]


def check(ranks: list[dict[str, Any]], key: str, rows: int, rounding: float) -> None:
    """Hold what all ranks found against what one process found."""
    expected = ranks[0][key][0]
    assert sorted(expected["seen"]) == list(range(rows))
    seen = [number for notes in ranks for number in notes[key][1]["seen"]]
    assert sorted(seen) == list(range(rows)), "every example once"
    for notes in ranks:
        for result in (notes[key][1]["found"], notes[key][1]["again"]):
            assert result["eval_tokens"] == expected["found"]["eval_tokens"]
            for name in ("eval_loss", "eval_accuracy", "eval_number"):
                assert result[name] == pytest.approx(expected["found"][name], rel=rounding), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", range(1, 6))
def test_figures_are_those_of_one_process(notes: list[dict[str, Any]], count: int, way: str) -> None:
    # The batches are the same; only the order of a float64 sum is another one.
    check(notes, f"{count} {way}", ROWS[count - 1], 1e-12)


def test_shards_of_a_dataset_give_the_figures_of_the_dataset(notes: list[dict[str, Any]]) -> None:
    check(notes, "dataset", ROWS[-1], 1e-6)


def test_lopsided_data_is_scored_by_the_rank_that_has_it(notes: list[dict[str, Any]]) -> None:
    seen = [each["5 lopsided"][1]["seen"] for each in notes]
    assert len(seen[-1]) == ROWS[-1]
    assert not any(seen[:-1])


def test_evaluations_in_training_are_those_of_one_process(notes: list[dict[str, Any]]) -> None:
    expected = notes[0]["in training"][0]
    assert len(expected) == 3
    assert expected[-1] < expected[0]
    for each in notes:
        for found in each["in training"][1:]:
            assert found == pytest.approx(expected, rel=1e-5)


def test_a_set_without_a_batch_is_the_same_error_everywhere(notes: list[dict[str, Any]]) -> None:
    for number, dispatched in enumerate((True, False)):
        messages = {each["nothing"][number] for each in notes}
        assert len(messages) == 1
        message = messages.pop()
        setting = None if dispatched else False
        assert "gave 0 batches" in message
        assert "per_device_eval_batch_size=" in message
        assert f"dispatch_batches=True, dispatch_eval_batches={setting} (in effect: {dispatched})" in message
        assert f"world size {len(notes)}" in message


def test_a_rank_without_an_example_is_the_same_error_everywhere(notes: list[dict[str, Any]]) -> None:
    assert {each["without"] for each in notes} == {
        f"rank 0 of {len(notes)} cannot load its eval_dataset (dispatch_batches=True, "
        "dispatch_eval_batches=False (in effect: False)): dataset is empty. Give at least one item."
    }


def test_sets_by_name_have_the_figures_of_each_alone(notes: list[dict[str, Any]]) -> None:
    for both, one, two in (found for each in notes for found in each["named"]):
        assert [both["eval_one_loss"], both["eval_two_loss"]] == [one["eval_loss"], two["eval_x_loss"]]
        assert [both["eval_one_tokens"], both["eval_two_tokens"]] == [
            one["eval_tokens"],
            two["eval_x_tokens"],
        ]
        assert both["eval_one_loss"] != both["eval_two_loss"]
