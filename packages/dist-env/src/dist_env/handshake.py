"""How the ranks of a job find one another in the store, and refuse a job that does not fit together.

Rank 0 calls a roll under a new number; every other rank answers each new roll until one names it as a member.
A launcher may keep its store across restarts of the job (torchrun does), so that calls, answers and failures
of dead processes lie about in it. None of these matter: dead ranks do not answer a new roll, and an old roll
names no process that is alive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import distributed as dist

from dist_env.coordination import UNKNOWN_HOST, Coordinator, RankRecord, lost_store, prefix_store
from dist_env.errors import (
    DistributedEnvironmentError,
    RankFailedError,
    RankTimeoutError,
    listed,
    one_line,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.01
# Rank 0 gives up first, and its reason needs a moment to reach the others.
_GRACE_SECONDS = 2.0


def join(store: Store, record: RankRecord, timeout: float) -> Coordinator:
    """Wait until every rank is here and their records agree.

    Args:
        store: Store that every rank can reach.
        record: This rank's record; its token is new.
        timeout: Seconds to wait for the other ranks.

    Returns:
        The coordinator of this meeting, whose keys no earlier and no later meeting shares.

    Raises:
        DistributedEnvironmentError: Two processes claim one rank, or the ranks contradict one another.
        RankTimeoutError: Ranks are missing; names them.
        RankFailedError: Rank 0 refused the job; carries its reason.
    """
    root = prefix_store("dist_env", store)
    deadline = time.monotonic() + timeout
    try:
        if record.rank == 0:
            return _Caller(root, record, timeout).run(deadline)
        return _answer(root, record, timeout, deadline + _GRACE_SECONDS)
    except dist.DistNetworkError:
        raise lost_store(record) from None


class _Caller:
    """Rank 0's side."""

    def __init__(self, root: Store, record: RankRecord, timeout: float) -> None:
        self._root = root
        self._timeout = timeout
        self._number = root.add("rolls", 1)
        self._roll = prefix_store(f"roll/{self._number}", root)
        self._records = {0: record}
        self._answers = 0
        self._tokens: list[str] = []
        self._roll.set("rank/0", record.to_text())

    def run(self, deadline: float) -> Coordinator:
        own = self._records[0]
        try:
            while len(self._records) < own.world_size:
                self._read_answers()
                self._check_rival()
                if time.monotonic() >= deadline:
                    missing = [rank for rank in range(own.world_size) if rank not in self._records]
                    raise late_joiners(own, missing, self._timeout)
                time.sleep(_POLL_SECONDS)
            check_agreement(self._records)
        except (DistributedEnvironmentError, RankTimeoutError) as error:
            self._refuse(error)
            raise
        self._roll.set("members", json.dumps([record.token for record in self._records.values()]))
        return Coordinator(self._roll, own)

    def _read_answers(self) -> None:
        while self._roll.check([f"answer/{self._answers + 1}"]):
            self._answers += 1
            record = RankRecord.from_text(self._roll.get(f"answer/{self._answers}"))
            self._tokens.append(record.token)
            twin = self._records.get(record.rank)
            self._records.setdefault(record.rank, record)
            if record.world_size != self._records[0].world_size:
                raise DistributedEnvironmentError(
                    f"WORLD_SIZE={record.world_size} of rank {record.rank} on {record.host} contradicts "
                    f"WORLD_SIZE={self._records[0].world_size} of rank 0 on {self._records[0].host}. Set "
                    "the same value on every rank."
                )
            if twin is not None:
                raise _claimed_twice(twin, record)

    def _check_rival(self) -> None:
        if self._root.add("rolls", 0) != self._number:
            rival = prefix_store(f"roll/{self._number + 1}", self._root)
            if rival.check(["rank/0"]):
                raise _claimed_twice(self._records[0], RankRecord.from_text(rival.get("rank/0")))

    def _refuse(self, error: Exception) -> None:
        """Tell everybody who has answered, and wait a moment for them to read it."""
        keys = [f"refused/{token}" for token in self._tokens]
        for key in keys:
            self._root.set(key, one_line(error))
        limit = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < limit and any(self._root.check([key]) for key in keys):
            time.sleep(_POLL_SECONDS)


def _answer(root: Store, record: RankRecord, timeout: float, deadline: float) -> Coordinator:
    """The other ranks' side."""
    open_rolls: dict[int, Store] = {}
    latest = 0
    while True:
        number = root.add("rolls", 0)
        if number > latest:
            latest = number
            open_rolls[number] = _answer_roll(root, record, number)
        for number, roll in list(open_rolls.items()):
            if roll.check(["members"]):
                if record.token in json.loads(roll.get("members")):
                    return Coordinator(roll, record)
                del open_rolls[number]
        if root.check([f"refused/{record.token}"]):
            reason = root.get(f"refused/{record.token}").decode()
            root.delete_key(f"refused/{record.token}")
            raise RankFailedError(f"rank 0 refused the job: {reason}.", 0)
        if time.monotonic() >= deadline:
            raise late_joiners(record, _absent(open_rolls.get(latest), record.world_size), timeout)
        time.sleep(_POLL_SECONDS)


def _answer_roll(root: Store, record: RankRecord, number: int) -> Store:
    roll = prefix_store(f"roll/{number}", root)
    roll.set(f"rank/{record.rank}", record.to_text())
    roll.set(f"answer/{roll.add('answers', 1)}", record.to_text())
    return roll


def _absent(roll: Store | None, world_size: int) -> list[int]:
    """Without an open roll it is rank 0 that is missing; about the others nothing is known."""
    if roll is None:
        return [0]
    return [rank for rank in range(world_size) if not roll.check([f"rank/{rank}"])]


def check_agreement(records: Mapping[int, RankRecord]) -> None:
    """Refuse ranks that cannot form one group.

    Args:
        records: The record of every rank.

    Raises:
        DistributedEnvironmentError: Backends differ, or two ranks use one device with nccl.
    """
    backends = {record.backend: rank for rank, record in sorted(records.items(), reverse=True)}
    if len(backends) > 1:
        ordered = sorted(backends.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} on rank {rank}" for name, rank in ordered)
        raise DistributedEnvironmentError(
            f"backend differs between ranks ({shown}). Use the same on every rank."
        )
    users: dict[str, int] = {}
    for rank, record in sorted(records.items()):
        if record.device_identity is None or "nccl" not in (record.backend or ""):
            continue
        other = users.setdefault(record.device_identity, rank)
        if other != rank:
            raise DistributedEnvironmentError(
                f"ranks {other} and {rank} on {record.host} both use {record.device}, which nccl does not "
                "allow. Set LOCAL_RANK (or device_map) so that each rank has its own device."
            )


def late_joiners(record: RankRecord, missing: Sequence[int], timeout: float) -> RankTimeoutError:
    """The error of a rank that waited in vain for others to join."""
    named = listed(f"rank {rank}" for rank in missing)
    return RankTimeoutError(
        f"joining the job: init_timeout={timeout:g} s passed on rank {record.rank} on {record.host}; "
        f"{len(missing)} of {record.world_size} ranks did not arrive: {named}.",
        dict.fromkeys(missing, UNKNOWN_HOST),
    )


def _claimed_twice(one: RankRecord, other: RankRecord) -> DistributedEnvironmentError:
    return DistributedEnvironmentError(
        f"RANK={one.rank} is claimed twice, by process {one.pid} on {one.host} and by process {other.pid} "
        f"on {other.host}. Give each process its own RANK."
    )
