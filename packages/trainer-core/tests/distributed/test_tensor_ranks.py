"""What two real ranks have in common that divide each layer between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks(launch: Callable[[str, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return launch("tensor_ranks.py", 2)


def test_undivided_weights_stay_equal_with_a_seed_for_each_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["embed"] == ranks[1]["embed"]


def test_they_write_the_same_text(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["text"] == ranks[1]["text"]


def test_loaders_of_their_own_give_them_the_same_batches(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["own"]) == 4
    assert ranks[0]["own"] == ranks[1]["own"]


def test_loaders_with_other_batches_are_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "ranks 0 and 1 must have the same batches, but of batch 1 rank 0 has one" in rank["apart"]
