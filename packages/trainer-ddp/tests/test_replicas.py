"""Ranks that do not hold the same things: they are told so, every one of them, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REFUSED = {
    "layers": ("layers.1.weight", "rank 0 has nothing of that name", "rank 1 has 'float32 [16, 16]"),
    "dtype": ("layers.0.weight", "rank 0 has 'float32", "rank 1 has 'bfloat16"),
    "frozen": ("head.weight", "rank 0 has 'float32 [23, 16], trained'", "rank 1 has 'float32 [23, 16]'"),
    "learning_rate": ("learning_rate", "rank 0 has 0.01", "rank 1 has 0.02"),
    "option": ("ddp.gradient_as_bucket_view", "rank 0 has False", "rank 1 has True"),
    "weights": ("head.bias", "ddp.init_sync", "rank 0 has", "rank 1 has"),
}
ALIKE = ("nothing", "weights, init_sync", "unused, told")
SPARE = ("spare.weight", "spare.bias")


@pytest.fixture(scope="module")
def notes(launch: Callable[..., Any]) -> list[dict[str, dict[str, str]]]:
    """What each of two ranks met in the scenarios that end alike on both."""
    job = launch("replicas.py", 2, "stop cause", *ALIKE, *REFUSED, "flipped", "unused", timeout=240)
    assert all("unused" in each for each in job.notes), job.told
    found: list[dict[str, dict[str, str]]] = job.notes
    return found


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_train_one_model(notes: list[dict[str, dict[str, str]]], name: str) -> None:
    weights = [each[name].get("result") for each in notes]
    assert weights[0] is not None, notes
    assert weights[0] == weights[1]


def test_every_rank_knows_which_callback_of_whichever_rank_stopped_the_run(
    notes: list[dict[str, dict[str, str]]],
) -> None:
    for each in notes:
        assert each["stop cause"].get("result") == "('stops on one rank', 'on_step_end', False)"


@pytest.mark.parametrize("name", REFUSED)
def test_difference_is_refused_at_the_start(notes: list[dict[str, dict[str, str]]], name: str) -> None:
    for each in notes:
        error = each[name].get("error", "no error")
        assert error.startswith("ConfigurationError: ")
        assert [words for words in REFUSED[name] if words not in error] == [], error


def test_flipped_weight_is_named_with_its_rank(notes: list[dict[str, dict[str, str]]]) -> None:
    for each in notes:
        error = each["flipped"].get("error", "no error")
        assert error.startswith("CheckpointError: ")
        assert "layers.0.weight" in error
        assert "rank 1" in error
        assert "embed.weight" not in error


def test_unused_parameters_are_named(notes: list[dict[str, dict[str, str]]]) -> None:
    for each in notes:
        error = each["unused"].get("error", "no error")
        assert error.startswith("ConfigurationError: ddp.find_unused_parameters=False")
        assert [name for name in SPARE if name not in error] == []


def test_parameters_unused_later_on_one_rank_end_the_job(launch: Callable[..., Any]) -> None:
    scenario = "unused later on one"
    job = launch("replicas.py", 2, scenario, timeout=180)
    assert all(process.code != 0 for process in job.processes), job.told
    errors = [each.get(scenario, {}).get("error", "no error") for each in job.notes]
    assert errors[1].startswith("ConfigurationError: ddp.find_unused_parameters=False"), job.told
    assert [name for name in SPARE if name not in errors[1]] == []
    # Rank 0 has nothing to reproach itself with, and tells who has.
    assert errors[0].startswith("RankFailedError: "), job.told
    assert "rank 1 on " in errors[0]
    assert "spare.weight" in errors[0]
