"""Four ranks with uneven data: lengths, warnings, settings, dummies, groups, and a rank that is killed."""

from collections.abc import Callable
from typing import Any

import pytest

Notes = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["all", pytest.param("few", marks=pytest.mark.full)])
def ranks(launch: Callable[..., list[Any]], request: pytest.FixtureRequest) -> list[Any]:
    """Ranks that connect to all others, and as among many ranks to few."""
    return launch("synchronized_four.py", 4, request.param, timeout=120)


@pytest.fixture(scope="module")
def notes(ranks: list[Any]) -> Notes:
    assert [rank.code for rank in ranks] == [0, 0, -9, 0], [rank.err for rank in ranks]
    return [rank.note for rank in ranks]


def test_length_is_the_least_of_the_ranks_or_the_greatest_under_pad(notes: Notes) -> None:
    for note in notes:
        assert note["lengths"][:2] == [3, 6]
        assert note["lengths"][2][0] == "TypeError"


def test_surplus_batches_are_named_once_and_by_one_rank(notes: Notes) -> None:
    sized, unsized = notes[0]["left out"]
    assert "after 3 batches on every rank" in sized
    assert [f"rank {rank}" in sized for rank in range(4)] == [True] * 4
    assert all(f"has {count} batches" in sized for count in (3, 5, 4, 6))
    assert "has 3 batches" in unsized
    assert unsized.count("has more than 3 batches") == 3
    assert [note["left out"] for note in notes[1:]] == [[]] * 3


def test_ranks_with_the_same_first_batch_are_named_once(notes: Notes) -> None:
    (message,), *quiet = notes[0]["same first batch"]
    assert "ranks 0 and 2 received the same first batch" in message
    assert "DistributedSampler" in message
    assert "DataloaderDispatcher" in message
    assert quiet == [[], [], []]
    assert [note["same first batch"] for note in notes[1:]] == [[[]] * 4] * 3


def test_settings_that_differ_or_are_unknown_are_refused_on_every_rank(notes: Notes) -> None:
    for note in notes:
        differ, unknown = note["settings"]
        assert differ[0] == unknown[0] == "DataError"
        assert "rank 0 " in differ[1]
        assert "has 'stop'" in differ[1]
        assert "rank 1 " in differ[1]
        assert "has 'pad'" in differ[1]
        assert "uneven='wait'" in unknown[1]


def test_a_rank_without_a_batch_gets_a_template_and_masks_it(notes: Notes) -> None:
    for rank in (0, 2):
        assert notes[rank]["templates"][0] == [[[[1, 0]], [[-100, -100]], True]] * 2
    for rank in (1, 3):
        got = notes[rank]["templates"][0]
        assert got == [[[[rank, number]], [[rank, number]], False] for number in range(2)]
    (said,) = notes[0]["templates"][1]
    assert "ranks 0 and 2 of 4 ranks without a single batch" in said
    assert [note["templates"][1] for note in notes[1:]] == [[]] * 3


def test_batches_that_cannot_be_masked_are_refused_on_every_rank(notes: Notes) -> None:
    for note in notes:
        kind, message = note["templates"][2]
        assert kind == "DataError"
        assert "make_dummy" in message


def test_own_dummies_are_made_once_of_the_last_batch(notes: Notes) -> None:
    for rank, note in enumerate(notes):
        assert note["templates"][3] == [rank] * (rank + 1) + [rank - 50] * (3 - rank)


def test_subgroups_end_by_themselves_beside_a_loader_of_all(notes: Notes) -> None:
    for note, batches in zip(notes, (3, 3, 4, 4), strict=True):
        assert note["subgroups"][:2] == [[batches] * 2, [batches] * 3]


def test_a_rank_outside_of_the_group_is_refused(notes: Notes) -> None:
    for rank, note in enumerate(notes):
        kind, message = note["subgroups"][2]
        assert kind == "DataError"
        assert f"process_group does not contain rank {rank}." in message


def test_a_killed_rank_is_named_within_the_timeout_by_those_who_wait_to_begin(notes: Notes) -> None:
    for rank in (0, 1, 3):
        kind, message = notes[rank]["lost"]
        assert kind == "RankFailedError"
        assert "no answer came from rank 2 (" in message
        assert "rank 0" not in message
        assert notes[rank]["seconds"] < 45
