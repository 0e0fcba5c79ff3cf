"""Models of Hugging Face train in a pipeline as they do in one process, write the same, and load again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROMPT, NEW = 4, 10
BLOCKS = {"1f1b": [[0, 1], [2, 3]], "zbv": [[0, 3], [1, 2]]}
MODELS = ("llama", "llama, tied", "gpt2", "gemma2", "mixtral", "qwen3")


@pytest.fixture(params=BLOCKS)
def schedule(request: pytest.FixtureRequest) -> str:
    """The name of a schedule."""
    return str(request.param)


@pytest.fixture(params=MODELS)
def lives(request: pytest.FixtureRequest, world: Callable[..., Any], schedule: str) -> list[Any]:
    """What each rank saw of a model."""
    found: list[Any] = world("hf", "2").seen(f"{request.param}, {schedule}")
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


def test_every_stage_is_given_the_positions_of_packed_rows(world: Callable[..., Any], schedule: str) -> None:
    for seen in world("hf", "2").seen(f"packed, {schedule}"):
        here, alone = seen["curves"]
        assert here == pytest.approx(alone, rel=1e-5)
        assert seen["eval"][0] == pytest.approx(seen["eval"][1], rel=1e-5)
        assert here != pytest.approx(seen["joined"], rel=1e-2), "documents do not see one another"
