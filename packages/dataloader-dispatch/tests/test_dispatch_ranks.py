"""The dispatcher on two and four real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NOTE = "Raised by the data loader of rank 0"


@pytest.fixture(scope="module")
def two(launch: Callable[..., list[Any]]) -> list[Any]:
    """What both ranks of a job of two tell, having left without closing their last dispatcher."""
    checks = (
        "contents,texts,independent,order,breaking,together,position,torch_loaders,random_numbers,epochs_told,"
        "ended_workers,uneven,dummies,in_step,collected,copies,errors,unsendable,refusals"
    )
    ranks = launch("dispatch_two.py", 2, checks)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert ranks[1].err == ""
    # The one warning, on the rank that loads, and nothing that torch says when a process ends badly.
    assert ranks[0].err
    for line in ranks[0].err.splitlines():
        assert "the last round of an epoch has 1 of the 2 batches it needs; nobody gets them" in line
    return [rank.note for rank in ranks]


@pytest.fixture(scope="module")
def four(launch: Callable[..., list[Any]]) -> list[Any]:
    ranks = launch("dispatch_four.py", 4)
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * 4, ranks
    return [rank.note for rank in ranks]


def test_every_kind_of_batch_arrives_as_it_was(two: list[Any]) -> None:
    assert [note["contents"] for note in two] == [[], []]


def test_long_texts_arrive(two: list[Any]) -> None:
    assert [note["texts"] for note in two] == [[], []]


def test_batches_are_independent_of_one_another(two: list[Any]) -> None:
    assert [note["independent"] for note in two] == [True, True]


def test_order_length_and_epochs(two: list[Any]) -> None:
    for rank, note in enumerate(two):
        first = [3, 1, 0, [rank, 2 + rank, 4 + rank], 1]
        assert note["order"] == [first, [5, [5000 + rank, 5002 + rank, 5004 + rank], 6]]


def test_collecting_a_dispatcher_does_not_wait_for_other_ranks(two: list[Any]) -> None:
    assert [note["collected"] for note in two] == [["True", list(range(rank, 20, 2))] for rank in (0, 1)]


def test_giving_up_a_pass_loses_nothing_and_leaves_nothing_stale(two: list[Any]) -> None:
    for right, enough, progress, refused in (note["breaking"] for note in two):
        assert right
        assert enough
        assert "newer one was made" in refused
        assert len(progress) == 30
    assert two[0]["breaking"][2] == two[1]["breaking"][2]


def test_workers_of_a_loader_that_is_read_ahead_end_and_the_position_stays(two: list[Any]) -> None:
    for rank, note in enumerate(two):
        for name, (first, left, refused, following) in note["ended_workers"].items():
            assert first == [rank, 2 + rank], name
            assert left == 0, name
            assert "this iterator is no longer valid" in refused
            # As after `end_workers` of such a loader alone.
            assert following == ([4 + rank, 6 + rank] if name == "torchdata" else [rank, 2 + rank]), name


def test_ranks_that_wait_for_each_other_in_every_step_get_their_rounds(two: list[Any]) -> None:
    assert [note["in_step"] for note in two] == [40 * 27] * 2


def test_rounds_that_travel_together_stay_apart(two: list[Any]) -> None:
    for wrong, largest_storage, rest, shapes, _ in (note["together"] for note in two):
        assert wrong == []
        assert largest_storage <= 64
        assert rest
        assert shapes


def test_rounds_travel_together_although_the_host_is_busy(two: list[Any]) -> None:
    assert two[1]["together"][-1] < 100


def test_state_counts_what_was_received(two: list[Any]) -> None:
    state, same, rest, after_load, end, at_four, kept, following, _ = two[0]["position"]
    assert state == after_load == {"epoch": 0, "position": 4}
    assert same
    assert rest == 8
    assert end == {"epoch": 1, "position": 0}
    assert at_four == {"epoch": 4, "position": 0}
    assert kept == {"epoch": 4, "position": 2}
    assert following == 4002
    assert two[1]["position"] == [{}, True, 8, {}, {}, {}, {}, 4003, False]


def test_a_state_is_copied_for_who_asks_for_it_and_not_for_the_epoch(two: list[Any]) -> None:
    """A trainer asks for the epoch in every step, and the state of a loader may be large."""
    assert two[0]["copies"] == [[0], 0, 2, 2]
    assert two[1]["copies"][:3] == [[0], 0, 0]


def test_a_dataset_is_told_each_epoch_once(two: list[Any]) -> None:
    seen = [[[0, 2], [0, 2, 4], [100], [300, 302, 304]], [[1, 3], [1, 3, 5], [101], [301, 303, 305]]]
    assert [note["epochs_told"] for note in two] == [[[0, 1, 3], seen[0]], [[], seen[1]]]


def test_torch_loaders_begin_anew_or_at_a_loaded_position(two: list[Any]) -> None:
    assert two[0]["torch_loaders"] == [[0, 2], 4, 0, [0, 2, 4, 6, 8, 10], [4, 6, 8, 10], 1]
    assert two[1]["torch_loaders"] == [[1, 3], None, 0, [1, 3, 5, 7, 9, 11], [5, 7, 9, 11], 1]


def test_the_loader_draws_no_random_numbers_in_its_thread(two: list[Any]) -> None:
    for note in two:
        assert note["random_numbers"] == [[True, True, [True] * 3, True]] * 3


def test_an_incomplete_last_round_is_left_out_padded_or_an_error(two: list[Any]) -> None:
    for rank, note in enumerate(two):
        stop5, stop4, stop1, stop2, pad5, pad4, pad1, error4, error5, custom, unmasked = note["uneven"]
        assert stop5 == stop4 == pad4 == error4 == [2, [rank], [2 + rank]]
        assert (stop1, stop2) == ([0], [1, [rank]])
        assert pad5 == [3, [rank], [2 + rank], [-100 if rank else 4]]
        assert pad1 == [1, [-100 if rank else 0]]
        assert error5[:2] == [2, "DataError"]
        assert "ended after 5 batches" in error5[2]
        assert "1 are left over" in error5[2]
        assert custom == [[1.0, 1.0], [0.0, 0.0] if rank else [1.0, 1.0]]
        assert unmasked[0] == "DataError"
        assert "type Tensor, which is not a mapping" in unmasked[1]


def test_dummies_are_told_on_every_rank(two: list[Any]) -> None:
    real = False
    for rank, note in enumerate(two):
        pad5, pad1, *nothing, same, many = note["dummies"]
        last = [4, False] if rank == 0 else [-100, True]
        only = [0, False] if rank == 0 else [-100, True]
        # A new pass begins with no batch, and so with no dummy.
        assert pad5 == [[real, [rank, real], [2 + rank, real], last, rank == 1]] * 2
        assert pad1 == [[real, only, rank == 1]] * 2
        assert nothing == [[[real, real]] * 2] * 3, "a loader without a batch: no batch and no error anywhere"
        assert same == [[real, [0, real], [1, real], [2, real], real]] * 2
        assert many == [False] * 500 + [rank == 1]


def test_fewer_batches_than_ranks(four: list[Any]) -> None:
    for rank, note in enumerate(four):
        one, none, square = note["few"]
        assert one == [[False, [-100 if rank else 0, rank > 0], rank > 0]] * 2
        assert none == [[False, False]] * 2
        # Along the other dimension of a mesh all get the same batch, dummies as well.
        assert square == [[False, [-100 if rank > 1 else 0, rank > 1], rank > 1]] * 2


def test_errors_of_the_loader_are_raised_on_every_rank(two: list[Any]) -> None:
    root, other = two[0]["errors"], two[1]["errors"]
    assert [entry[0] for entry in root] == [
        "KeyError", "FileNotFoundError", "SystemExit", "TwoArgumentsError", "LockedError", "NoNumberError",
        *["DataError"] * 3,
    ]  # fmt: skip
    # Other errors than Python's own become the nearest of these, with their type and text.
    assert [entry[:2] for entry in other] == [
        ["KeyError", "'known'"],
        ["FileNotFoundError", "[Errno 2] No such file: 'a.bin'"],
        ["SystemExit", "5"],
        ["RuntimeError", "TwoArgumentsError: 3: why"],
        ["RuntimeError", "LockedError: locked"],
        ["ValueError", "NoNumberError: ten"],
        *[entry[:2] for entry in root[6:]],
    ]
    lock, pickled, image = (entry[1] for entry in root[6:])
    assert "batch['x'] is a _thread.lock, which cannot be sent" in lock
    assert "set unpickle_batches=True" in lock
    assert "does not pickle" in pickled
    assert "batch[0]['image'] is a dispatch_loaders.Opaque, which cannot be sent" in image
    for rank, entries in enumerate((root, other)):
        for entry in entries:
            assert entry[2][0].startswith(NOTE)
        for entry in entries[:6]:
            assert entry[3], "the traceback of the loader is part of what is shown"
            assert entry[4] == [rank, 2 + rank, 4 + rank, 6 + rank, 8 + rank]
            assert entry[5] == 10, "the next pass is whole"
    assert all("Traceback of rank 0" in entry[2][1] for entry in other)


def test_a_batch_without_memory_to_send_it_is_an_error_and_tears_nothing(two: list[Any]) -> None:
    for note in two:
        assert note["unsendable"] == [[0, 300, 600], "RuntimeError", [0, 300, 600, 900, 1200]]


def test_arguments_are_compared_and_refused_everywhere(two: list[Any]) -> None:
    differs = "prefetch must be the same on every rank, but it is 2 on rank 0"
    for rank, note in enumerate(two):
        results = note["refusals"]
        texts = [text for _, text in results]
        assert results[0][0] == "DataError"
        assert texts[0].startswith(differs)
        assert "3 on rank 1" in texts[0]
        for text, wrong in zip(texts[1:4], ("uneven='drop'", "prefetch=0", "loader=None"), strict=True):
            assert wrong in text
            assert text.startswith("on rank 0") == (rank == 1)
        assert results[4][0] == "TypeError"
        assert "cannot be iterated" in texts[4]
        assert "dp_mesh_dim='tp'" in texts[5]
        assert "called 'dp'" in texts[5]
        assert "dp_mesh_dim=1" in texts[6]
        assert "timeout_seconds=0" in texts[7]
        assert texts[8].startswith(
            "unpickle_batches must be the same on every rank, but it is True on rank 0"
        )
        assert [kind for kind, _ in results[9:]] == [
            "TypeError", "TypeError", "DataError", "RuntimeError", "RuntimeError"
        ]  # fmt: skip


def test_a_line_of_ranks_gets_consecutive_batches(four: list[Any]) -> None:
    for rank, note in enumerate(four):
        last = [8 + rank] if rank < 2 else [-1]
        assert note["line"] == [[rank, 4 + rank], last, [3, *last]]


def test_several_dimensions_of_a_mesh_may_have_different_batches(four: list[Any]) -> None:
    for rank, notes in enumerate(four):
        assert notes["both"] == notes["line"]
        # The stages are another dimension, and of the other two one has a single rank.
        assert notes["two of three"] == notes["by index"]
        assert notes["both"][0] == [rank, rank + 4]


def test_hybrid_meshes_share_batches_along_the_other_dimension(four: list[Any]) -> None:
    halves = [[[0, 2], [4, 6, 8], [5, 4, 6, 8]], [[1, 3], [5, 7, 9], [5, 5, 7, 9]]]
    whole = [[0, 1], list(range(2, 10)), [10, *range(2, 10)]]
    for rank, note in enumerate(four):
        assert note["by name"] == halves[rank // 2]
        assert note["by index"] == halves[rank % 2]
        assert note["rows"] == halves[rank % 2]
        assert note["same"] == whole
