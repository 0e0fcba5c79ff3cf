"""Masks of dropout: equal where activations are whole on each rank, apart where they are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

INSIDE = [f"{layer} in {module}" for layer in range(2) for module in ("attention", "mlp")]
BEHIND = [f"{layer} {place}" for layer in range(2) for place in ("behind attention", "behind mlp", "norm")]
ALIKE = {"whole": ["embedding", *BEHIND], "sequence": ["embedding"]}
APART = {"whole": INSIDE, "sequence": [*INSIDE, *BEHIND]}


@pytest.fixture(scope="module")
def both(launch: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return launch("dropouts.py", 2)


@pytest.mark.parametrize("kind", ALIKE)
def test_masks_are_alike_where_activations_are_whole_and_apart_where_divided(
    both: list[dict[str, Any]], kind: str
) -> None:
    for notes in both:
        found = notes[kind]
        assert found["alike"] == sorted(ALIKE[kind])
        assert found["apart"] == sorted(APART[kind])
        assert found["repeated"] == 0, "two places drew the same numbers"
        assert found["begun"]
        assert found["generators"]
        assert found["loss"]


@pytest.mark.parametrize("kind", ALIKE)
def test_a_layer_is_recomputed_with_the_same_masks(both: list[dict[str, Any]], kind: str) -> None:
    assert all(notes[kind]["recomputed"] for notes in both)


def test_a_part_of_a_layer_whose_masks_would_differ_is_refused(both: list[dict[str, Any]]) -> None:
    assert both[0]["whole"]["a part recomputed"] == "nothing"
    assert "Checkpoint the activations of whole layers" in both[0]["sequence"]["a part recomputed"]


@pytest.mark.parametrize("case", ["dropout 0", "dropout of whole activations"])
def test_what_no_rank_draws_apart_is_that_of_one_process(both: list[dict[str, Any]], case: str) -> None:
    assert all(notes[case] for notes in both)


def test_masks_of_a_model_without_layers(both: list[dict[str, Any]]) -> None:
    assert both[0]["in a row"] == [False, True]
