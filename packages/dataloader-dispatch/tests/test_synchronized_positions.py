"""Two ranks whose loaders have positions, epochs and worker processes."""

from collections.abc import Callable
from typing import Any

import pytest

Notes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> Notes:
    ranks = launch("synchronized_two.py", 2, timeout=60)
    assert [rank.code for rank in ranks] == [0, -9], [rank.err for rank in ranks]
    return [rank.note for rank in ranks]


@pytest.mark.parametrize("uneven", ["stop", "pad"])
@pytest.mark.parametrize("loader", ["counted", "plain", "stream"])
def test_a_pass_resumes_behind_each_of_its_batches(notes: Notes, loader: str, uneven: str) -> None:
    for note in notes:
        assert note[f"{loader} {uneven}"]["differences"] == []


def test_passes_have_the_documented_batches(notes: Notes) -> None:
    firsts = {
        (loader, uneven): [note[f"{loader} {uneven}"]["first"] for note in notes]
        for loader in ("counted", "plain")
        for uneven in ("stop", "pad")
    }
    for (_, uneven), (short, long) in firsts.items():
        assert len(short) == len(long) == (3 if uneven == "stop" else 6)
        assert short[3:] == ["dummy"] * (len(short) - 3)
        assert "dummy" not in long
    assert firsts["plain", "pad"][1] == [[5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [15]]
    assert sorted(item for batch in firsts["counted", "pad"][1] for item in batch) == list(range(5, 16))


def test_every_rank_begins_the_next_epoch_after_one_that_was_cut_short(notes: Notes) -> None:
    for note in notes:
        batches = note["counted stop"]["expected"]
        assert len(batches) == 6
        # Another order, so that it is another epoch, and not the rest of the first one.
        assert batches[3:] != batches[:3]
    long = notes[1]["counted pad"]["expected"]
    assert notes[1]["counted stop"]["expected"] == long[:3] + long[6:9]


def test_epoch_and_progress_are_those_of_the_batches_delivered(notes: Notes) -> None:
    (short, _, progress, epoch), (long, target, *_) = notes[0]["epochs"], notes[1]["epochs"]
    assert short == [0, 0, 0, 1, 1]
    assert long == [0, 0, 0, 0, 1]
    assert target == 4
    assert progress == [0.0, 0.0, 0.25, 1.0]
    assert epoch == 1


def test_a_pass_that_was_broken_off_loses_no_batch(notes: Notes) -> None:
    for note in notes:
        told = note["broken_off"]
        first, again, epoch = told["torch"]
        assert again[:2] == first
        assert epoch == (1 if note is notes[0] else 0)
        assert told["rows"]
        assert told["iterator"] == [0, 1, 2, 3, 4]


def test_only_the_newest_iterator_is_valid(notes: Notes) -> None:
    for note in notes:
        kind, message = note["broken_off"]["superseded"]
        assert kind == "RuntimeError"
        assert "newer iterator" in message
        assert note["broken_off"]["newer"] == 2


def test_a_pass_may_run_inside_the_steps_of_another(notes: Notes) -> None:
    assert [note["side_by_side"] for note in notes] == [[[[0, 1, 2]], [[0, 1, 2]]]] * 2


def test_set_epoch_reaches_a_sampler_and_a_plain_loader_has_no_state(notes: Notes) -> None:
    for note in notes:
        (first, second), absent, *passed_on = note["sampled"]
        assert first != second
        assert absent == [False] * 3
        assert passed_on == [2, True, "DistributedSampler"]
    for epoch in range(2):
        assert sorted(notes[0]["sampled"][0][epoch] + notes[1]["sampled"][0][epoch]) == list(range(8))


def test_a_pass_draws_random_numbers_only_where_it_begins(notes: Notes) -> None:
    assert [note["random_numbers"] for note in notes] == [[8, True]] * 2


def test_a_dataset_is_told_each_epoch_once(notes: Notes) -> None:
    for rank, note in enumerate(notes):
        first = [10 * rank + index for index in range(4)]
        assert note["epochs_told"] == [[0, 1], [first, [100 + item for item in first]]]


def test_the_death_of_a_worker_process_is_told_to_all(notes: Notes) -> None:
    for other, own in zip(*(note["worker_death"] for note in notes), strict=True):
        if own[0] == "DataError":  # the second try
            assert other == own
            assert "Make a new one on every rank" in own[1]
            continue
        assert own[0] == "RuntimeError"
        assert "DataLoader worker" in own[1]
        assert other[0] == "RankFailedError"
        assert "rank 1 (" in other[1]
        assert "DataLoader worker" in other[1]
    assert [len(note["worker_death"]) for note in notes] == [4, 4]


def test_the_length_of_an_iterable_dataset_is_not_relied_on(notes: Notes) -> None:
    assert [note["iterable_guess"] for note in notes] == [[0, 1], [10, 11]]


def test_a_rank_killed_in_a_pass_is_named_at_its_end(notes: Notes) -> None:
    kind, message = notes[0]["lost"]
    assert kind == "RankFailedError"
    assert "no answer came from rank 1 (" in message
    assert notes[0]["seconds"] < 10
