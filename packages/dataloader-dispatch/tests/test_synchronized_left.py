"""Passes of synchronized loaders that are left in the middle, and errors that come while reading ahead."""

from collections.abc import Callable
from typing import Any

import pytest

Notes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> Notes:
    ranks = launch("synchronized_left.py", 2, timeout=240)
    assert [rank.code for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    return [rank.note for rank in ranks]


def test_what_was_read_ahead_is_delivered_once(notes: Notes) -> None:
    for note in notes:
        # This loader begins anew in each pass.
        assert note["persistent"] == [[0, 1], [0, 1, 2, 3, 4, 5]]
        assert note["own_iterator"] == [[0, 1], [2, 3, 4, 5]]
        assert note["nodes"] == [[0, 1], [2, 3, 4, 5]]
        assert note["workers_ended"] == [[0, 1], [2, 3, 4, 5, 6, 7]]


def test_an_error_read_ahead_is_raised_in_the_next_pass(notes: Notes) -> None:
    assert [note["error_read_ahead"][0] for note in notes] == [[0, 1], [0, 1]]
    (kind, told), own = notes[0]["error_read_ahead"][1], notes[1]["error_read_ahead"][1]
    assert kind == "RankFailedError"
    assert "failed: OSError: the disk is gone" in told
    assert own == ["OSError", "the disk is gone"]


def test_the_end_of_workers_reaches_the_loader(notes: Notes) -> None:
    assert [note["workers_of_a_plain_loader"] for note in notes] == [[1, 0]] * 2


def test_an_error_that_cannot_be_described_is_told(notes: Notes) -> None:
    kind, told = notes[0]["unspeakable"]
    assert kind == "RankFailedError"
    assert "failed: Unspeakable" in told


def test_close_does_not_wait_for_what_a_rank_reads_ahead(notes: Notes) -> None:
    got, seconds, *again = notes[0]["closed_early"]
    assert again == [["RuntimeError", "the data loader was closed. Make a new one."]] * 2
    assert got == [0, 1]
    assert seconds < 12


def test_a_rank_without_a_dummy_is_named_before_the_first_batch(notes: Notes) -> None:
    assert [note["no_dummy"][1] for note in notes] == [0, 0]
    assert notes[0]["no_dummy"][0] == ["ValueError", "no dummy here"]
    assert "failed: ValueError: no dummy here" in notes[1]["no_dummy"][0][1]
