"""Small messages among ranks, and what the others are told of one that is lost, fails or sends nonsense."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from dist_env import ControlGroup, DistributedEnvironmentError

HOST = socket.gethostname()
# A liveness check takes 5 s, the timeout of the groups 600 s; the rest is for a machine that is busy.
WITHIN = 60.0
CONNECTED = pytest.mark.parametrize("connected", ["all", "few"])
"""Whether each rank connects to all others, or as among many ranks to few."""


def test_one_rank_needs_no_connection() -> None:
    group = ControlGroup([0], 1.0)
    assert group.gather("alone", {"a": 1}) == [{"a": 1}]
    assert group.process_group is None
    group.close()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DistributedEnvironmentError, match="timeout_seconds=0 must be a positive"):
        ControlGroup([0], 0)
    with pytest.raises(DistributedEnvironmentError, match="timeout_seconds=inf must be a positive"):
        ControlGroup([0], float("inf"))
    with pytest.raises(DistributedEnvironmentError, match="timeout_seconds='30' must be a positive"):
        ControlGroup([0], "30")  # type: ignore[arg-type]
    with pytest.raises(DistributedEnvironmentError, match="ranks is empty"):
        ControlGroup([], 1.0)
    with pytest.raises(DistributedEnvironmentError, match="2 ranks need a process group, and there is none"):
        ControlGroup([0, 1], 1.0)


@CONNECTED
def test_six_ranks_exchange_values_and_name_a_killed_one(launch: Callable[..., Any], connected: str) -> None:
    job = launch("controlling.py", 6, "six", connected)
    assert job.codes == [0, 0, 0, -9, 0, 0], job.err
    for rank, seen in enumerate(job.notes):
        assert seen["names"] == [f"rank {each} ({HOST})" for each in range(6)]
        assert seen["short"] == [{"rank": each} for each in range(6)]
        assert seen["equal"] == ["same"] * 6
        assert (seen["largest"], seen["none"]) == ([5, 9, 1, 0], [])
        assert seen["some"] == ["even", None] * 3
        assert seen["long"] == [1000 + 1_000_000 * each for each in range(6)]
        if rank in (0, 2):
            assert seen["pair"] == [0, 2]
            assert seen["closed"][:2] == ["RuntimeError", "the control group was closed. Make a new one."]
        if rank != 3:
            kind, text, named, when = seen["killed"]
            assert (kind, named) == ("RankFailedError", 3)
            assert text.startswith("saving: a connection broke, and within 5 s no answer came from rank 3 (")
            assert when - job.notes[3]["killed"] < WITHIN
    # The last one reports to another than the first, who tells all.
    for name, told in (
        ("a huge size", f"it is said to have {2**62} bytes"),
        ("no value", "sent a message that cannot be read"),
        ("a longer value", "it is said to have 72057594037927"),
        ("of another rank", "it holds no values of ranks"),
        ("of nobody", "it holds no values of ranks"),
        ("of no ranks", "it holds no values of ranks"),
        ("another type", "it holds a int"),
    ):
        for seen in job.notes:
            kind, text, named, _ = seen[name]
            assert (kind, named) == ("RankFailedError", 5)
            assert text.startswith(f"{name}: rank 5 ({HOST}) sent a message that cannot be read: ")
            assert told in text


def test_among_many_ranks_each_connects_to_few(launch: Callable[..., Any]) -> None:
    job = launch("controlling.py", 16, "sixteen", "few")
    assert job.codes == [0] * 16, job.err
    for rank, seen in enumerate(job.notes):
        assert seen["equal"] == ["same"] * 16
        assert {distance: seen[str(distance)] for distance in (3, 5, 6)} == {
            distance: (rank - distance) % 16 for distance in (3, 5, 6)
        }
    # Of the 15 others; beside these the group listens.
    assert max(seen["sockets"] for seen in job.notes) < 12, [seen["sockets"] for seen in job.notes]


@CONNECTED
def test_why_a_rank_failed_is_told_also_where_its_connections_close_first(
    launch: Callable[..., Any], connected: str
) -> None:
    job = launch("controlling.py", 2, "failing", connected)
    assert job.codes == [0, 1], job.err
    kind, text, named, _ = job.notes[0]["failed"]
    assert (kind, named) == ("RankFailedError", 1)
    assert text == f"saving: a connection broke, and rank 1 on {HOST} failed: OSError: no such disk."


@CONNECTED
def test_a_forked_child_ends_and_leaves_an_exchange_under_way_alone(
    launch: Callable[..., Any], connected: str
) -> None:
    job = launch("controlling.py", 2, "forked", connected)
    assert job.codes == [0, 0], job.err
    assert job.notes == [{"close": 0, "drop": 0, "exit": 0, "after": [0, 1]}] * 2


@CONNECTED
def test_ctrl_c_and_closing_do_not_wait_for_the_timeout(launch: Callable[..., Any], connected: str) -> None:
    job = launch("controlling.py", 2, "interrupted", connected)
    assert job.codes == [0, 0], job.err
    assert job.notes[0]["interrupted"] <= job.notes[0]["closed"] < WITHIN  # the timeout is 120 s


@CONNECTED
def test_every_rank_closes_an_exchange_under_way(launch: Callable[..., Any], connected: str) -> None:
    job = launch("controlling.py", 4, "abandoned", connected)
    assert job.codes == [0] * 4, job.err
    assert all(seen["closed"] < WITHIN for seen in job.notes)  # the timeout is 120 s


def test_closing_ends_where_gloo_does_not(launch: Callable[..., Any]) -> None:
    job = launch("controlling.py", 2, "unbreakable")
    assert job.codes == [0] * 2, job.err
    assert job.notes[0]["closed"] < WITHIN  # the timeout is 120 s


def test_ctrl_c_while_waiting_or_closing_ends_where_gloo_does_not(launch: Callable[..., Any]) -> None:
    job = launch("controlling.py", 2, "interrupted unbreakable")
    assert job.codes == [0] * 2, job.err
    assert set(job.notes[0]) == {"waiting", "dropping", "closing"}
    assert max(job.notes[0].values()) < WITHIN  # the timeout is 120 s


@CONNECTED
def test_opening_leaves_the_store_to_other_threads(launch: Callable[..., Any], connected: str) -> None:
    job = launch("controlling.py", 2, "opened", connected)
    assert job.codes == [0, 0], job.err
    assert all(seen["opened"] < 30 for seen in job.notes)  # it stood still for 40 s


def test_a_rank_that_does_not_open_it_is_named(launch: Callable[..., Any]) -> None:
    job = launch("controlling.py", 2, "late")
    assert job.codes == [0, 0], job.err
    kind, text, named, _ = job.notes[0]["late"]
    assert (kind, named) == ("RankFailedError", 1)
    assert text.startswith(f"opening: within timeout_seconds=1 no answer came from rank 1 ({HOST})")


def test_a_process_may_be_another_rank_of_a_later_job(launch: Callable[..., Any]) -> None:
    job = launch("controlling.py", 3, "remade")
    assert job.codes == [0, 0, 0], job.err
    assert job.notes == [{"one": [0, 1]}, {"one": [0, 1], "two": [1, 2]}, {"two": [1, 2]}]
