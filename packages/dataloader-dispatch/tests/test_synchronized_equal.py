"""Ranks that divide one model and read by themselves: the same batches, or an error that names them."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module", params=["all", "few"])
def notes(launch: Callable[..., list[Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of ranks that connect to all others, and as among many ranks to few."""
    ranks = launch("synchronized_equal.py", 4, request.param, timeout=120)
    assert [rank.code for rank in ranks] == [0] * 4, [rank.err for rank in ranks]
    return [rank.note for rank in ranks]


def test_equal_batches_are_handed_on_without_a_warning(notes: list[dict[str, Any]]) -> None:
    for rank, note in enumerate(notes):
        assert note["same"] == [0, 1, 2, 3]
        assert note["warned"] == []
        assert note["padded"] == ([0, 1, -100, -100] if rank < 2 else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("first", "of batch 1 rank 2 has one and rank 3 has one of its own"),
        ("third", "of batch 3 rank 2 has one and rank 3 has one of its own"),
        ("shorter", "of batch 4 rank 2 has one and rank 3 has no further one"),
        ("none", "of batch 1 rank 2 has one and rank 3 has no further one"),
    ],
)
def test_unlike_batches_are_refused_on_every_rank(notes: list[dict[str, Any]], case: str, told: str) -> None:
    for note in notes:
        kind, message = note[case]
        assert kind == "DataError"
        assert "ranks 2 and 3 must have the same batches" in message
        assert told in message
        assert "layout.data_rank(rank)" in message


def test_what_cannot_be_compared_is_refused(notes: list[dict[str, Any]]) -> None:
    assert all(note["unsent"][0] == "DataError" for note in notes)
    assert all("equal_batches must be the same on all ranks" in note["sets"][1] for note in notes)


def test_ranks_with_the_same_batches_are_one_reader_for_the_positions_of_others(
    notes: list[dict[str, Any]],
) -> None:
    assert [note["reader"] for note in notes] == [[0, 2], [0, 2], [1, 2], [1, 2]]
