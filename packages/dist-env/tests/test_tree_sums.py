"""Sums over four real ranks, in a tree of three floors, and what is said when one of them is missing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from dist_env import DistributedEnvironmentError, HostSums, StaticDistributedEnvironment, tree_sums

HOST = socket.gethostname()


def test_one_rank_needs_nobody() -> None:
    sums = HostSums(StaticDistributedEnvironment())
    assert sums.sum([1, 2.5]) == [1.0, 2.5]
    sums.close()


def test_bad_use_is_refused() -> None:
    with pytest.raises(DistributedEnvironmentError, match="timeout=0 is not a positive number"):
        HostSums(StaticDistributedEnvironment(), timeout=0)
    with pytest.raises(DistributedEnvironmentError, match="there is none"):
        HostSums(StaticDistributedEnvironment(world_size=2, local_world_size=2))


def test_a_rank_that_is_stopped_before_it_says_who_it_is_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take itself for connected, and the other one would wait for it until its time is up."""
    secret, began = b"0123456789abcdef", time.monotonic()
    with tree_sums.listen() as (listener, address):
        callers = tree_sums._Callers(listener, secret)
        host, port = address.rsplit(":", 1)
        with closing(callers), socket.create_connection((host, int(port))) as caller:
            assert callers.wait(10) == []
            monkeypatch.setattr(time, "monotonic", lambda: began + 3600)
            assert callers.wait(0) == []
            caller.sendall(tree_sums._INTRODUCTION.pack(secret, 7))
            ((rank, connection),) = callers.wait(10)
            connection.close()
    assert rank == 7


def test_a_killed_rank_ends_all_and_is_named(launch: Callable[..., Any]) -> None:
    job = launch("summing.py", 4, "killed")
    assert job.codes == [0, 0, 0, -9], job.err
    for notes in job.notes[:3]:
        assert notes["ones"] == [4.0, 6.0, 2.0**53]
        assert notes["many"] is True
        assert notes["same bits"] is True
        assert notes["not a number"] == "[nan]"
        assert notes["two at once"] == [4.0, 8.0]
        assert notes["waited"] < 20
        assert f"rank 3 on {HOST} " in notes["error"]
    assert "RankFailedError: adding: rank 3 on" in job.notes[1]["error"]


def test_ranks_that_do_different_things_are_told(launch: Callable[..., Any]) -> None:
    job = launch("summing.py", 4, "unlike")
    assert job.codes == [0] * 4, job.err
    assert "of 2 numbers, while this rank is at its exchange" in job.notes[1]["error"]
    assert all("error" in notes and notes["waited"] < 20 for notes in job.notes)


def test_a_late_rank_is_not_waited_for_longer_than_agreed(launch: Callable[..., Any]) -> None:
    job = launch("summing.py", 4, "late")
    assert job.codes == [0] * 4, job.err
    assert f"rank 3 on {HOST} sent nothing for 2 s" in job.notes[1]["error"]
    assert all("error" in notes and notes["waited"] < 20 for notes in job.notes)
