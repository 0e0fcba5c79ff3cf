"""Stages of a splitter of one's own, and schedules by class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HELD = {
    "1f1b": ["embed.weight", "head.weight"],
    "tied": ["embed.weight", "embed.weight"],
    "interleaved_1f1b": ["embed.weight", "embed.weight"],
    "zbv": ["embed.weight"],
}
WAYS = [pytest.param(way, marks=pytest.mark.full if way == "tied" else ()) for way in HELD]
BLOCKS = ("first", "second", "third", "fourth")
OF_RANK_0 = {
    "1f1b": {"first", "second"},
    "tied": {"first", "second"},
    "interleaved_1f1b": {"first", "third"},
    "zbv": {"first", "fourth"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_without_a_row_of_blocks_has_the_curve_of_one_process(
    world: Callable[..., Any], way: str
) -> None:
    for seen in world("two", "2").seen(f"split, {way}"):
        here, alone = seen["curves"]
        assert len(here) == 6
        assert here == pytest.approx(alone, rel=1e-5)
        trained, exported, one_process = seen["eval"]
        assert trained == pytest.approx(one_process, rel=1e-5)
        assert exported == pytest.approx(one_process, rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_hold_what_their_stages_have(world: Callable[..., Any], way: str) -> None:
    held = [seen["held"] for seen in world("two", "2").seen(f"split, {way}")]
    everything = [name for names in held for name in names]
    assert [name for name in everything if name in ("embed.weight", "head.weight")] == HELD[way]
    assert {name.split(".")[0] for name in held[0]} & set(BLOCKS) == OF_RANK_0[way]
    # The second and the last stage of four use this norm; here they are on one rank.
    assert everything.count("between.weight") == (1 if way == "interleaved_1f1b" else 2)
    assert everything.count("places") == 1


def test_texts_need_the_stages_of_block_splitter(world: Callable[..., Any]) -> None:
    for error in world("two", "2").errors("split, generating"):
        assert error.startswith("ConfigurationError: model_splitter=")
        assert "only those can be called as one model" in error
        assert "generate with one process" in error


def test_a_parameter_that_is_left_out_is_named(world: Callable[..., Any]) -> None:
    for error in world("two", "2").errors("split, leaving out"):
        assert error.startswith("ConfigurationError: model_splitter='third.norm.weight' is a parameter that")
        assert "Give it to a stage" in error


@pytest.mark.parametrize("way", ["class", pytest.param("subclass", marks=pytest.mark.full), "partial"])
def test_a_schedule_class_has_the_curve_of_one_process(world: Callable[..., Any], way: str) -> None:
    for seen in world("two", "2").seen(f"factory, {way}"):
        here, alone = seen["curves"]
        assert len(here) == 6
        assert here == pytest.approx(alone, rel=1e-5)


def test_the_order_of_calls_decides_what_comes_after_the_blocks(world: Callable[..., Any]) -> None:
    ranks = world("two", "2").seen("another order")
    assert [seen["norm"] for seen in ranks] == [False, True]
    for seen in ranks:
        here, alone = seen["curves"]
        assert here == pytest.approx(alone, rel=1e-5)
