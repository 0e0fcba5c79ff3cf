"""A sharded model begins with the values that one process draws, and each rank holds only its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WAYS = ("drawn", "of rank 0", "without a seed")


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, world: Callable[..., Any]) -> Any:
    """The world of so many ranks."""
    return world("few", str(request.param))


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_one_process(ranks: Any, way: str) -> None:
    for seen in ranks.seen(way):
        found, wanted = seen["names"]
        assert found == wanted
        assert seen["differing"] == []
        assert seen["buffers"] == ["noise", "positions"]
        assert seen["differing buffers"] == []


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_holds_its_rows_only(ranks: Any, way: str) -> None:
    seen = ranks.seen(way)
    for pieces in (each["pieces"] for each in seen):
        for name, piece in pieces.items():
            assert piece["is sharded"], name
            assert piece["rows"] == piece["rows of torch.chunk"], name
            # torch pads the shorter pieces to the size of the first.
            assert piece["bytes held"] <= piece["bytes of the largest piece"], name
    rows = [each["pieces"]["layers.0.gate.weight"]["rows"] for each in seen]
    assert rows == [1] + [0] * (len(seen) - 1), "one row for many ranks"
    assert sum(each["pieces"]["embed.weight"]["rows"] for each in seen) == 53


@pytest.mark.parametrize("way", WAYS)
def test_ties_stay_one_object(ranks: Any, way: str) -> None:
    assert all(seen["tied"] for seen in ranks.seen(way))


def test_generators_go_on_as_in_one_process(ranks: Any) -> None:
    for here, alone in ranks.seen("generators"):
        assert here == alone
