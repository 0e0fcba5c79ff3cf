"""Real jobs whose collectives break: killed, frozen, failing, leaving and merely late ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_env import (
    DistributedEnvironmentError,
    RankFailedError,
    StaticDistributedEnvironment,
    naming_lost_ranks,
)
from dist_env.liveness import is_broken_collective

HOST = socket.gethostname()
# A liveness check takes 5 s; the rest is for a machine that is busy with other things.
WITHIN = 30.0
# As gloo wrote them with torch 2.13, for a killed peer, a reset connection and a timeout.
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
BROKEN = (
    f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:22425. This is typically caused by ...",
    f"{GLOO}pair.cc:537] Read error [127.0.0.1]:41864: Connection reset by peer. This is typically ...",
    f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms",
    "ProcessGroupWrapper: Monitored Barrier encountered error running collective: CollectiveFingerPrint(...",
)
OWN = (
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x8)",
    f"cannot read {GLOO}pair.cc:1]",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: ...",
    "Expected to have finished reduction in the prior iteration before starting a new one.",
    "",
)


@pytest.mark.parametrize("text", BROKEN)
def test_errors_of_gloo_are_recognised(text: str) -> None:
    assert is_broken_collective(RuntimeError(text))


@pytest.mark.parametrize("text", OWN)
def test_errors_of_a_model_are_not(text: str) -> None:
    assert not is_broken_collective(RuntimeError(text))


def test_type_decides_where_there_is_one() -> None:
    assert is_broken_collective(dist.DistBackendError("NCCL communicator was aborted"))
    assert is_broken_collective(dist.DistNetworkError("Connection reset"))
    assert not is_broken_collective(torch.OutOfMemoryError(BROKEN[0]))
    assert not is_broken_collective(RankFailedError(BROKEN[0], 1))


def test_seconds_must_be_positive() -> None:
    with (
        pytest.raises(DistributedEnvironmentError, match="seconds=0 is not a positive number"),
        naming_lost_ranks(StaticDistributedEnvironment(), "step 1", seconds=0),
    ):
        pass


def check_killed(job: Any, victim: int, doing: str) -> None:
    """Every survivor named the killed rank, soon, and ended with that error."""
    killed = job.notes[victim]["killed"]
    assert job.codes[victim] == -9
    for rank, note in enumerate(job.notes):
        if rank == victim:
            continue
        assert job.codes[rank] == 1, job.err
        text, named, cause, _, when = note["killed"]
        assert text.startswith(f"{doing}: rank {victim} on {HOST} is lost: "), text
        assert "look at its log" in text
        assert named == victim
        assert cause == "RuntimeError"
        assert when - killed < WITHIN
        assert f"RankFailedError: {doing}: rank {victim} on {HOST} is lost" in job.processes[rank].err


def test_two_ranks(launch: Callable[..., Any]) -> None:
    job = launch("losing.py", 2, "duo")
    assert [note["passed"] for note in job.notes] == [[True] * 5] * 2, "other errors pass unchanged"
    assert job.notes[0]["alone"] is True
    text, named, cause, original, _ = job.notes[0]["late"]
    assert text.startswith("step 2: a collective failed, though every rank answers: RuntimeError: ")
    assert "Timed out waiting 1000ms" in text
    assert "Timed out waiting 1000ms" in original
    assert (named, cause) == (None, "RuntimeError")
    check_killed(job, 1, "step 3: all-reduce")


def test_four_ranks_one_killed_in_a_backward(launch: Callable[..., Any]) -> None:
    """Some of the survivors have no connection to the dead rank, and gloo tells them nothing."""
    job = launch("losing.py", 4, "quad", timeout=200)
    text, named, _, _, _ = job.notes[0]["unheard"]
    assert text.startswith(
        f"step 0: rank 3 on {HOST} was not heard in a liveness check of 3 s and may be lost, or only busy"
    )
    assert named == 3
    check_killed(job, 2, "step 4: backward")


def test_killed_holder_of_the_store(launch: Callable[..., Any]) -> None:
    job = launch("losing.py", 2, "holder")
    check_killed(job, 0, "step 3: all-reduce")
    assert "it held the store of the job, which is gone" in job.notes[1]["killed"][0]


def test_frozen_holder_of_the_store(launch: Callable[..., Any]) -> None:
    """Nobody answers, not even the store; the other rank ends nevertheless."""
    job = launch("losing.py", 2, "frozen")
    assert job.codes == [-9, 0], job.err
    text, named, _, _, when = job.notes[1]["frozen"]
    assert text.startswith(
        f"step 5: rank 0 on {HOST} is lost: it held the store of the job, which did not answer"
    )
    assert named == 0
    assert when - job.notes[1]["froze"] < WITHIN
    assert job.notes[1]["left"] - when < WITHIN, "neither does leaving the environment hang"


def test_killed_rank_ends_the_wait_at_a_barrier(launch: Callable[..., Any]) -> None:
    """Long before the timeout, and not because a rank is only late."""
    job = launch("losing.py", 3, "waits")
    assert job.codes == [1, -9, 1], job.err
    for note in (job.notes[0], job.notes[2]):
        text, _, _, _, when = note["killed"]
        # Whoever finds it out fails with that, and may be what the other one hears of first.
        assert f"rank 1 on {HOST} is lost: no answer from its process for 2 s" in text
        assert when - job.notes[1]["killed"] < WITHIN
        assert note["refused"] == "lost_after=0 is not a positive number of seconds."


def test_error_of_another_rank_is_carried(launch: Callable[..., Any]) -> None:
    job = launch("losing.py", 2, "fails")
    assert job.codes == [1, 1]
    text, named, cause, _, _ = job.notes[0]["left"]
    assert text == f"step 6: rank 1 on {HOST} failed: ValueError: the data of rank 1 is bad."
    assert (named, cause) == (1, "RuntimeError")
    assert "ValueError: the data of rank 1 is bad" in job.processes[1].err


def test_rank_that_left_in_good_order_is_named(launch: Callable[..., Any]) -> None:
    job = launch("losing.py", 2, "leaves")
    assert job.codes == [1, 0], job.err
    text, named, _, _, _ = job.notes[0]["left"]
    assert text.startswith(
        f"step 6: rank 1 on {HOST} has left the job in good order while other ranks still wait"
    )
    assert named == 1
