"""Gradients travel once a step, and what evaluation and generation gather is dropped again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

UNITS = 3
"""Two blocks and the root."""
GATHERED = 5
"""Gathers of one microbatch: each block for the forward and the backward pass, the root for both at once."""


@pytest.fixture(params=["2", "4"], ids="{} ranks".format)
def accumulating(request: pytest.FixtureRequest, world: Callable[..., Any]) -> list[Any]:
    """Collectives of each rank."""
    launch, name = {"2": ("few", "2"), "4": ("four", "4, refused")}[request.param]
    found: list[Any] = world(launch, name).seen("accumulating")
    return found


def test_gradients_travel_once_a_step(accumulating: list[Any]) -> None:
    for seen in accumulating:
        for name, run in seen.items():
            assert run["steps"] == 2
            # reduce_each_microbatch sends more, to keep less in between.
            times = 4 if name == "4, each" else 1
            assert run["calls"]["_reduce_scatter_base_"] == run["steps"] * UNITS * times, name


def test_copies_add_their_gradients_up_once_a_step(accumulating: list[Any]) -> None:
    for seen in accumulating:
        assert ("4, copies" in seen) == (len(accumulating) == 4)
        for name, run in seen.items():
            norms = 2  # one in each step, over the ranks that share the weights
            uses = 2  # how many ranks have used each parameter
            assert run["calls"]["allreduce_"] == norms + uses + (2 * UNITS if "copies" in name else 0), name


def test_weights_are_gathered_for_each_microbatch(accumulating: list[Any]) -> None:
    for seen in accumulating:
        gathers = {name: run["calls"]["_allgather_base_"] for name, run in seen.items()}
        assert gathers["1"] == 2 * GATHERED
        assert gathers["4"] == 2 * 4 * GATHERED
        assert gathers["4, kept"] <= 2 * 4 * UNITS


def test_accumulated_curves_do_not_depend_on_where_weights_rest(accumulating: list[Any]) -> None:
    for seen in accumulating:
        assert seen["4"]["losses"] != seen["1"]["losses"]
        for name in set(seen) - {"1", "4"}:
            assert seen[name]["losses"] == pytest.approx(seen["4"]["losses"], rel=1e-6), name


def test_parameters_are_shards_again(world: Callable[..., Any]) -> None:
    for seen in world("few", "2").seen("evaluating"):
        assert seen["whole"] == {
            "evaluation and samples": [],
            "the step before": [],
            "the backward pass": [],
        }
        assert seen["whole after evaluate()"] == []
        assert seen["whole after training"] == []


def test_evaluation_and_samples_leave_the_curve_alone(world: Callable[..., Any]) -> None:
    first, *others = world("few", "2").seen("evaluating")
    plain, disturbed = first["losses"]
    assert len(plain) == 6
    assert plain == disturbed
    assert all(other["losses"] == first["losses"] for other in others)
    assert all(other["eval_loss"] == first["eval_loss"] for other in others)


def test_all_ranks_write_the_same_text(world: Callable[..., Any]) -> None:
    first, *others = world("few", "2").seen("evaluating")
    # Three rounds in training and one at the end, with two prompts.
    assert len(first["texts"]) == 8
    assert len(set(first["texts"])) > 2
    assert all(other["texts"] == first["texts"] for other in others)


def test_logits_and_generators_that_differ_become_those_of_rank_0(world: Callable[..., Any]) -> None:
    first, second = world("few", "2").seen("generating")
    assert first["alone"] != second["alone"], "outside of the context ranks see things differently"
    assert first["texts"] == second["texts"]
    assert len({len(text.split()) for text in first["texts"]}) > 1, "texts of several lengths"
    for rank, seen in enumerate((first, second)):
        own = torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist()
        assert seen["drawn"] == own, "each rank draws on from its own state"
        assert seen["evaluated"]


def test_work_and_peak_are_those_of_all_ranks(world: Callable[..., Any]) -> None:
    first, second = world("few", "2").seen("work")
    assert first == second
    # Two blocks of 16 to 16, 1, 4 and 4 to 16, and the head; two rows of six tokens on each rank.
    tokens, blocks, head = 2 * 2 * 6, 2 * (16 * 16 + 16 + 2 * 64), 16 * 53
    for model, hardware, peak in first:
        assert model == 6 * (blocks + head) * tokens
        # The last product of a block, back to its width, is not needed again.
        assert hardware - model == pytest.approx(2 * (blocks - 2 * 64) * tokens, rel=1e-5)
        assert peak == 2e9, "of both ranks"


def test_what_an_error_has_left_of_a_step_is_not_summed_with_the_next(world: Callable[..., Any]) -> None:
    for curves in world("few", "2").seen("left"):
        for name, curve in curves.items():
            assert len(curve) == 4
            complete = f"6 0 {name.split()[-1]}"
            assert curve == curves[complete], name
