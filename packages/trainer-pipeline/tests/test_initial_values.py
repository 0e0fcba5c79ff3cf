"""A rank begins with the values that one process draws, and has its own layers only."""

from __future__ import annotations

from typing import Any

import pytest

LAYERS = 8
WAYS = (
    "drawn, 1f1b",
    "drawn, tied",
    "drawn, interleaved_1f1b",
    "drawn, zbv",
    "drawn, unseeded",
)
TIED = ("drawn, tied", "drawn, zbv")
LEFT = ("drawn, 1f1b", "drawn, unseeded")
OF_RANKS = pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(count, way, marks=pytest.mark.full if count == "four" and way in LEFT else ())
        for count in ("two", "four")
        for way in WAYS
    ],
    indirect=["ranks"],
)


def blocks_of(names: list[str]) -> set[int]:
    return {int(name.split(".")[1]) for name in names if name.startswith("layers.")}


@OF_RANKS
def test_values_are_those_of_one_process(ranks: Any, way: str) -> None:
    for seen in ranks.seen(way):
        assert seen["differing"] == []
        assert seen["differing buffers"] == []
        assert {"places", "shift"} <= set(seen["buffers"])
        scales = {f"layers.{block}.scale" for block in blocks_of(seen["held"])}
        assert {name for name in seen["buffers"] if name.endswith(".scale")} == scales


@OF_RANKS
def test_the_ranks_together_have_every_parameter_once(ranks: Any, way: str) -> None:
    held = [name for seen in ranks.seen(way) for name in seen["held"]]
    wanted = list(ranks.seen(way)[0]["whole"])
    # A tied one is where the embedding is and where the head is; ZBV has both on one rank.
    twice = ["embed.weight"] if way == "drawn, tied" else []
    assert sorted(held) == sorted(wanted + twice)
    assert ("head.weight" in wanted) == (way not in TIED)


@OF_RANKS
def test_no_rank_holds_more_than_its_part(ranks: Any, way: str) -> None:
    count = len(ranks.codes)
    for seen in ranks.seen(way):
        whole = sum(seen["whole"].values())
        assert seen["numel"] == sum(seen["whole"][name] for name in seen["held"])
        assert seen["bytes"] == 4 * seen["numel"]
        # What stands in for the others takes no memory.
        assert seen["bytes of stand-ins"] <= 4 * 8
        assert 0 < seen["numel"] < 1.5 * whole / count


@pytest.mark.parametrize("ranks", ["two", "four"], indirect=True)
def test_layers_lie_as_the_schedule_has_them(ranks: Any) -> None:
    count = len(ranks.codes)
    for rank, seen in enumerate(ranks.seen("drawn, interleaved_1f1b")):
        size = LAYERS // (2 * count)
        first, second = rank * size, (rank + count) * size
        assert blocks_of(seen["held"]) == {*range(first, first + size), *range(second, second + size)}
    for rank, seen in enumerate(ranks.seen("drawn, zbv")):
        size = LAYERS // (2 * count)
        first, second = rank * size, (2 * count - 1 - rank) * size
        assert blocks_of(seen["held"]) == {*range(first, first + size), *range(second, second + size)}


def test_generators_go_on_as_in_one_process(ranks: Any) -> None:
    for here, alone in ranks.seen("generators"):
        assert here == alone
