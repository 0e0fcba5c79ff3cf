"""Lost, stuck and interrupted ranks: the others are told who it was, in time, and every process ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KILLED = -9


@pytest.mark.parametrize(("victim", "world"), [(1, 3), (0, 2)])
def test_a_killed_rank_is_named_by_all_others(
    launch: Callable[..., list[Any]], victim: int, world: int
) -> None:
    ranks = launch("dispatch_failing.py", world, f"kill {victim}")
    assert ranks[victim].code == KILLED
    for number, rank in enumerate(ranks):
        if number != victim:
            assert (rank.code, rank.err) == (0, "")
            assert rank.note["error"] == "RankFailedError"
            assert rank.note["rank"] == victim
            assert f"rank {victim} (" in rank.note["text"]
            assert rank.note["seconds"] < 45, "before timeout_seconds=60"


def test_a_killed_rank_is_named_to_one_that_begins_another_pass(
    launch: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks = launch("dispatch_failing.py", 3, "anew", tmp_path / "told")
    assert [rank.code for rank in ranks] == [0, 0, KILLED]
    assert [rank.note for rank in ranks[:2]] == [{"rank": 2}] * 2


def test_a_stuck_rank_is_named_within_the_timeout(launch: Callable[..., list[Any]]) -> None:
    ranks = launch("dispatch_failing.py", 3, "stop 1")
    for rank in (ranks[0], ranks[2]):
        assert (rank.code, rank.err) == (0, "")
        assert rank.note["error"] == "RankTimeoutError"
        assert rank.note["missing"] == [1]
        assert "took no batch for 3 s" in rank.note["text"]
        assert 2.5 < rank.note["seconds"] < 45


def test_a_stuck_loader_is_named_within_the_timeout(launch: Callable[..., list[Any]]) -> None:
    for rank in launch("dispatch_failing.py", 2, "stuck"):
        assert (rank.code, rank.err) == (0, "")
        assert rank.note["error"] == "RankTimeoutError"
        assert rank.note["missing"] == [0]
        assert "the loader of rank 0" in rank.note["text"]
        assert 2.5 < rank.note["seconds"] < 45


def test_a_loader_that_recovers_from_a_timeout_gives_no_rank_alone_more(
    launch: Callable[..., list[Any]],
) -> None:
    for rank in launch("dispatch_failing.py", 2, "late"):
        assert (rank.code, rank.err) == (0, "")
        assert rank.note["told"] == [[0]] * 6, "the six rounds behind the timeout"


def test_a_worker_process_that_dies_is_told_everywhere(launch: Callable[..., list[Any]]) -> None:
    for rank in launch("dispatch_failing.py", 2, "worker"):
        assert rank.code == 0
        assert rank.note["count"] <= 5
        assert any("worker processes (num_workers=1) may have died" in note for note in rank.note["notes"])
        assert any("Raised by the data loader of rank 0" in note for note in rank.note["notes"])


def test_an_error_in_the_training_loop_of_the_first_rank_ends_all(launch: Callable[..., list[Any]]) -> None:
    ranks = launch("dispatch_failing.py", 2, "raise 0")
    assert [rank.code for rank in ranks] == [1, 1]
    assert ranks[0].err.count("Traceback") == 1
    assert "ValueError: in the training loop" in ranks[0].err
    assert ranks[1].note["rank"] == 0
    assert "has closed its data loader or ended" in ranks[1].note["text"]
    assert ranks[1].err.rstrip().splitlines()[-1].count("RankFailedError") == 1


def test_ctrl_c_on_one_rank_that_waits_ends_all(launch: Callable[..., list[Any]]) -> None:
    ranks = launch("dispatch_failing.py", 2, "interrupt")
    assert [rank.code for rank in ranks] == [1, -2]
    assert ranks[1].note["error"] == "KeyboardInterrupt"
    assert ranks[1].note["seconds"] < 45  # before timeout_seconds=60
    assert ranks[1].err.rstrip().endswith("KeyboardInterrupt")
    assert ranks[0].note["rank"] == 1


def test_a_rank_that_closes_first_takes_nothing_from_one_that_is_behind(
    launch: Callable[..., list[Any]],
) -> None:
    ranks = launch("dispatch_failing.py", 2, "left behind")
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * 2
    assert [rank.note for rank in ranks] == [{"taken": [0, 2, 4, 6], "rank": 1}, {"taken": [1, 3, 5, 7]}]


def test_leaving_behind_a_destroyed_group_is_quiet(launch: Callable[..., list[Any]]) -> None:
    ranks = launch("dispatch_failing.py", 2, "destroy")
    assert [(rank.code, rank.out, rank.err) for rank in ranks] == [(0, "", "")] * 2
    assert [rank.note for rank in ranks] == [{"count": 6}] * 2


@pytest.mark.parametrize(("dropping", "told"), [(0, "has closed its data loader or ended"), (1, "rank 1 (")])
def test_dropping_it_while_something_is_traced_ends_it_as_ever(
    launch: Callable[..., list[Any]], dropping: int, told: str
) -> None:
    ranks = launch("dispatch_failing.py", 2, f"traced {dropping}")
    assert [(rank.code, rank.out, rank.err) for rank in ranks] == [(0, "", "")] * 2
    assert ranks[dropping].note["seconds"] < 45  # before timeout_seconds=60
    assert ranks[dropping].note["threads"] == ["MainThread"]
    assert ranks[1 - dropping].note["rank"] == dropping
    assert told in ranks[1 - dropping].note["text"]


def test_hostile_messages_are_errors_that_name_the_rank(launch: Callable[..., list[Any]]) -> None:
    """Nothing that comes over the network runs code or takes memory without end."""
    ranks = launch("dispatch_hostile.py", 2)
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * 2
    told = ranks[1].note["told"]
    assert len(told) == 20
    for name, text in told.items():
        assert text.startswith("RankFailedError: "), (name, text)
        assert "rank 0 (" in text
        assert "sent a message that cannot be read" in text
    assert ranks[1].note["mebibytes"] < 1500
