"""Four real ranks over gloo."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dist_env import StaticDistributedEnvironment
from dist_env.coordination import Coordinator, RankRecord

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def job(launch: Callable[..., Any]) -> Any:
    """One job whose notes all tests of this file read."""
    return launch("exchange.py", 4)


def test_the_job_ended_as_meant(job: Any) -> None:
    assert job.codes == [0, 0, 0, -9], job.err


def test_barrier_holds_everybody(job: Any) -> None:
    assert [note["barriers"] for note in job.notes] == [[True] * 3] * 4


def test_objects_reach_every_rank(job: Any) -> None:
    assert [note["broadcast"] for note in job.notes] == [[2, "x"]] * 4
    assert [note["unlike"] for note in job.notes] == [[1, 10, 100, 1000]] * 4
    assert [note["pair"] for note in job.notes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [note["pair_broadcast"]["from"] for note in job.notes] == [1, 1, 3, 3]
    assert [note["sum"] for note in job.notes] == [6.0] * 4
    assert all("is not one of the ranks" in note["bad_src"] for note in job.notes)


def test_an_object_that_cannot_be_sent_is_refused_on_every_rank(job: Any) -> None:
    own = "the object['lock'] is a _thread.lock, which cannot be sent. What can: None, bool, int, float"
    assert [text.startswith(own) for text in job.notes[0]["unfit"]] == [True] * 2
    told = "the object of rank 0 cannot be sent to other ranks. Its own error says why."
    assert [note["unfit"] for note in job.notes[1:]] == [[told] * 2] * 3


def test_hostile_messages_of_a_rank_are_an_error_that_names_it(job: Any) -> None:
    reasons = ["unknown type", "can't allocate memory", "is said to have -7 bytes", "0 bytes", "malformed"]
    for note in job.notes[1:]:
        for text, reason in zip(note["hostile"], reasons, strict=True):
            assert text.startswith("0 exchanging objects: rank 0 sent a message that cannot be read: ")
            assert reason in text


def test_main_process_goes_first(job: Any) -> None:
    assert [note["first"] for note in job.notes] == [[rank == 0, "main was here"] for rank in range(4)]
    assert [note["first_local"] for note in job.notes] == [True, False, False, False]


def test_failure_of_the_main_process_reaches_the_others(job: Any) -> None:
    assert job.notes[0]["first_failed"] == "OSError: no such data set"
    for note in job.notes[1:]:
        assert note["first_failed"].startswith(f"RankFailedError: rank 0 on {HOST} failed")
        assert "no such data set" in note["first_failed"]
        assert f"rank 0 ({HOST})" in note["first_late"]


def test_rank_0_informs_and_all_warn_once(job: Any) -> None:
    assert [p.err.count("spoken once") for p in job.processes] == [1, 0, 0, 0]
    for rank, process in enumerate(job.processes):
        assert process.err.count("spoken by all") == 1
        assert f"[rank {rank} {HOST}] spoken by all" in process.err


def test_a_group_of_somebody_else_is_used_and_left(job: Any) -> None:
    for note in job.notes:
        assert note["static"] == [0, 1, 2, 3]
        assert note["inner_owns"] is False
        assert note["still_there"] is True
        assert note["closed"] is True
    assert all("exists already" in process.err for process in job.processes)


def test_repr_names_the_host(job: Any) -> None:
    assert all(f"rank={rank}," in note["repr"] for rank, note in enumerate(job.notes))
    assert all(f"hostname={HOST!r}" in note["repr"] for note in job.notes)
    assert all("backend='gloo'" in note["repr"] for note in job.notes)


def test_a_stall_names_rank_and_phase(job: Any) -> None:
    # On a slow machine the stall lasts until it is told again.
    told = job.notes[0]["stalls"]
    assert {(*missing, phase, step) for missing, phase, step, _ in told} == {(2, "data", 1)}
    text = told[0][-1]
    assert f"missing: rank 2 on {HOST}, last seen at step 1 in phase 'data'" in text
    assert "in stall" in text, "the stack of rank 2 shows the function it sleeps in"
    assert text.count("waiting for other ranks") == 3
    assert [note["stalls"] for note in job.notes[1:]] == [[]] * 3
    assert "progress again" in job.processes[0].err


def test_a_killed_rank_is_named(job: Any) -> None:
    for rank in (0, 1, 2):
        text, missing = job.notes[rank]["barrier"]
        assert missing == {"3": HOST}
        assert f"'after the save': timeout=10 s passed on rank {rank}" in text
        assert f"1 of 4 ranks did not arrive: rank 3 ({HOST})." in text
    assert job.notes[0]["death"] == [[[3], "silent", "save"]]


def test_vanished_holder_of_the_store_is_told(job: Any) -> None:
    for rank in (1, 2):
        assert f"rank {rank} on {HOST} lost the store of the job" in job.notes[rank]["store_lost"]


class ArrivesLast:
    """A store in which another rank arrives just before this one looks whether it is there."""

    def __init__(self, store: dist.Store, key: str, arrive: Callable[[], None]) -> None:
        self._store, self._key, self._arrive = store, key, arrive

    def check(self, keys: list[str]) -> bool:
        if keys == [self._key]:
            self._arrive()
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def record_of(rank: int) -> RankRecord:
    return RankRecord.of(StaticDistributedEnvironment(rank=rank, world_size=2, local_world_size=2))


def test_a_barrier_holds_if_the_last_comes_while_others_look_who_is_late() -> None:
    store = dist.HashStore()
    last = Coordinator(store, record_of(1))
    came = threading.Event()

    def arrive() -> None:
        if not came.is_set():
            came.set()
            last.barrier([0, 1], "all", 5.0, "")

    first = Coordinator(
        ArrivesLast(store, "barrier/all/0/1", arrive),  # type: ignore[arg-type]
        record_of(0),
    )
    first.barrier([0, 1], "all", 0.2, "")
    assert came.is_set()


def test_a_barrier_holds_if_the_last_dies_before_it_says_that_all_have_come() -> None:
    store = dist.HashStore()

    class Dies(ArrivesLast):
        def add(self, key: str, amount: int) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Coordinator(Dies(store, "", print), record_of(1)).barrier([0, 1], "all", 5.0, "")  # type: ignore[arg-type]
    Coordinator(store, record_of(0)).barrier([0, 1], "all", 0.2, "")
