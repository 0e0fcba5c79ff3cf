"""Models of Hugging Face train in a pipeline as they do in one process, write the same, and load again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROMPT, NEW = 4, 10
BLOCKS = {"1f1b": [[0, 1], [2, 3]], "zbv": [[0, 3], [1, 2]]}
USUAL = {
    "llama": "1f1b",
    "llama, tied": "zbv",
    "gpt2": "1f1b",
    "gemma2": "zbv",
    "mixtral": "1f1b",
    "qwen3": "zbv",
    "packed": "zbv",
}
"""Schedules that are not left to `full`."""


def ways(*names: str) -> list[Any]:
    """Models by schedule."""
    return [
        pytest.param(name, schedule, marks=() if USUAL[name] == schedule else pytest.mark.full)
        for name in names
        for schedule in BLOCKS
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of a life is one of each model."""
    if "lives" in metafunc.fixturenames:
        names = [name for name in USUAL if name != "packed"]
        metafunc.parametrize(("model", "schedule"), ways(*names))


@pytest.fixture
def lives(world: Callable[..., Any], model: str, schedule: str) -> list[Any]:
    """What each rank saw of a model."""
    found: list[Any] = world("hf", "2").seen(f"{model}, {schedule}")
    assert [seen for seen in found if "error" in seen] == []
    return found


def test_curve_and_evaluation_are_those_of_one_process(lives: list[Any]) -> None:
    for seen in lives:
        here, alone = seen["curves"]
        assert len(here) == 6, "loss and norm of three steps"
        assert here == pytest.approx(alone, rel=1e-5)
        assert seen["eval"][0] == pytest.approx(seen["eval"][1], rel=1e-5)


def test_each_rank_has_its_blocks(lives: list[Any], schedule: str) -> None:
    assert [seen["blocks"] for seen in lives] == BLOCKS[schedule]


def test_texts_are_those_of_generate(lives: list[Any]) -> None:
    for seen in lives:
        expected = seen["texts of HF"]
        assert {len(row) for row in expected["greedy"]} == {PROMPT + NEW}
        assert expected["greedy"][0][PROMPT:] != expected["greedy"][1][PROMPT:]
        assert seen["texts"]["greedy"] == expected["greedy"]
        assert seen["texts"]["without a cache"] == expected["greedy"]
        assert expected["drawn"] != expected["greedy"]
        assert seen["texts"]["drawn"] == expected["drawn"]


def test_the_exported_directory_is_the_model(lives: list[Any]) -> None:
    for seen in lives:
        from_export, from_one_process = seen["logits"]
        assert from_export < 1e-5
        assert from_one_process < 1e-3


@pytest.mark.parametrize(("name", "schedule"), ways("packed"))
def test_every_stage_is_given_the_positions_of_packed_rows(
    world: Callable[..., Any], name: str, schedule: str
) -> None:
    for seen in world("hf", "2").seen(f"{name}, {schedule}"):
        here, alone = seen["curves"]
        assert here == pytest.approx(alone, rel=1e-5)
        assert seen["eval"][0] == pytest.approx(seen["eval"][1], rel=1e-5)
        assert here != pytest.approx(seen["joined"], rel=1e-2), "documents do not see one another"
