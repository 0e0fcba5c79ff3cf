"""Whom a job waits for, from what the ranks said."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from dist_env import Heartbeat, RankStatus, StallReport, StaticDistributedEnvironment
from dist_env.heartbeat import RankState, find_missing

WAITING = ("/app/train.py:9 in train", "/x/torch/distributed/distributed_c10d.py:3000 in all_reduce")
READING = ("/app/train.py:7 in train", "/app/data.py:20 in read")


def status(
    rank: int,
    step: int | None = 5,
    order: int = 1,
    *,
    state: RankState = "running",
    stack: tuple[str, ...] = (),
    error: str | None = None,
) -> RankStatus:
    return RankStatus(
        rank=rank, host=f"node{rank}", state=state, step=step, phase="data", order=order, age=3.0,
        stack=stack, error=error,
    )  # fmt: skip


CASES = {
    "failed beats silent": (
        [status(0), status(1, state="silent"), status(2, state="failed", error="OSError: x")],
        (2,),
    ),
    "silent and never heard of": (
        [status(0), status(1, state="silent"), status(2, None, state="unknown")],
        (1, 2),
    ),
    "the one not in a collective, though it is ahead": (
        [status(0, order=3, stack=READING), status(1, stack=WAITING), status(2, stack=WAITING)],
        (0,),
    ),
    "behind in steps": ([status(0, 6), status(1, 5), status(2, 6)], (1,)),
    "behind in beats of a step": ([status(0, order=2), status(1, order=2), status(2, order=1)], (2,)),
    "another stack than most": (
        [status(0, stack=("a",)), status(1, stack=("a",)), status(2, stack=("b",))],
        (2,),
    ),
    "all at one place": ([status(0, stack=WAITING), status(1, stack=WAITING)], ()),
    "done is not missing": ([status(0, 6), status(1, 2, state="done"), status(2, 5)], (2,)),
}


@pytest.mark.parametrize("name", CASES)
def test_missing_rank_is_found(name: str) -> None:
    ranks, missing = CASES[name]
    assert find_missing(ranks) == missing


def test_report_reads_well() -> None:
    ranks = (status(0, stack=WAITING), status(1, 4, stack=READING))
    text = str(StallReport(ranks=ranks, missing=(1,), seconds=12.34))
    assert text.splitlines() == [
        "no progress for 12.3 s; missing: rank 1 on node1, last seen at step 4 in phase 'data'",
        "rank  host   step  phase  last beat  state",
        "   0  node0     5  data   3.0 s ago  waiting for other ranks",
        "   1  node1     4  data   3.0 s ago  running",
        "stack of rank 1, innermost call last:",
        "  /app/train.py:7 in train",
        "  /app/data.py:20 in read",
    ]
    failed = status(1, state="failed", error="OSError: disk full")
    told = str(StallReport(ranks=(ranks[0], failed), missing=(1,), seconds=0.0))
    assert told.startswith("rank 1 on node1 failed at step 5 in phase 'data': OSError: disk full")


def test_one_process_that_hangs_sees_its_own_stack(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[StallReport] = []
    with Heartbeat(
        StaticDistributedEnvironment(), stall_timeout=0.6, interval=0.1, on_stall=reports.append
    ) as heart:
        heart.beat(3, "data")
        dawdle(1.5)
    assert reports[0].missing == (0,)
    assert "no progress for" in caplog.text
    assert f"{Path(__file__).name}" in reports[0].ranks[0].stack[-1]
    assert reports[0].ranks[0].stack[-1].endswith("in dawdle")
    assert all(
        record.levelno == logging.ERROR for record in caplog.records if "no progress" in record.message
    )


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


def test_beat_is_cheap() -> None:
    with Heartbeat(StaticDistributedEnvironment(), stall_timeout=60) as heart:
        start = time.thread_time()
        for step in range(20_000):
            heart.beat(step, "forward")
        each = (time.thread_time() - start) / 20_000
    assert each < 50e-6


def test_heartbeat_cannot_be_started_twice() -> None:
    heart = Heartbeat(StaticDistributedEnvironment())
    with heart, pytest.raises(RuntimeError, match="was started before"):
        heart.start()
    with pytest.raises(ValueError, match="stall_timeout=0 is not a positive number"):
        Heartbeat(StaticDistributedEnvironment(), stall_timeout=0)
