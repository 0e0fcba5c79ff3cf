"""A rank of four has a quarter of the model, and needs little more in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RANKS = 4
MEBIBYTE = 2**20
HEAP = 48 * MEBIBYTE
"""What the C library may keep of values that were freed, however large the model: while the model is recorded
up to 32 MiB, and then some of the largest tensors of 4 MiB."""


@pytest.fixture
def measured(world: Callable[..., Any]) -> list[Any]:
    """What each rank measured while the model was built, scored and exported."""
    found: list[Any] = world("four", "4").seen("measured")
    return found


def test_each_rank_has_a_quarter(measured: list[Any]) -> None:
    whole, largest = measured[0]["whole"], measured[0]["largest"]
    for seen in measured:
        assert seen["own"] == pytest.approx(whole / RANKS, rel=0.1)
    # The tied weight of embedding and head is on two ranks, all others are on one.
    assert sum(seen["own"] for seen in measured) == whole + largest


def test_no_rank_has_the_whole_model_while_it_is_built(measured: list[Any]) -> None:
    for seen in measured:
        peak = seen["peaks"]["building"]
        print(f"building: {peak / MEBIBYTE:.1f} MiB, {peak / seen['whole']:.0%} of the whole")
        assert peak < min(seen["own"] + HEAP, 0.7 * seen["whole"])


@pytest.mark.parametrize("doing", ["evaluating", "saving"])
def test_nothing_is_gathered(measured: list[Any], doing: str) -> None:
    for seen in measured:
        print(f"{doing}: {seen['peaks'][doing] / MEBIBYTE:.1f} MiB")
        assert seen["peaks"][doing] < seen["own"] / 2
