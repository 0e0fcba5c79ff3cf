"""Two real ranks that part well or badly."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = socket.gethostname()
UNRULY = Path(__file__).parent / "workers" / "unruly.py"


def test_without_a_port_ranks_meet_disagree_and_train(
    launch: Callable[..., Any], usual_port_taken: bool
) -> None:
    job = launch("unruly.py", 2, "disagree", unset=["MASTER_PORT"])
    assert job.codes == [0, 0], job.err
    outs = [process.out.splitlines() for process in job.processes]
    for refusal, _ in outs:
        assert "backend differs between ranks (gloo on rank 0, cpu:gloo on rank 1)" in refusal
    ports = {line for _, line in outs}
    assert len(ports) == 1, "both ranks know the port that rank 0 chose"
    assert not usual_port_taken or ports != {"port 29501"}


def test_failing_rank_ends_the_job_with_its_own_message_and_torchrun_restarts_it(
    torchrun: Callable[..., Any],
) -> None:
    """Although a collective is under way that will never end, and the other rank waits in a barrier.

    torchrun keeps its store for the second start; what the dead ranks wrote there must not count.
    """
    done = torchrun(2, "--max-restarts", "1", str(UNRULY), "fail", timeout=90)
    assert f"[rank 1 {HOST}] this rank failed with ValueError: the data of rank 1 is bad" in done.err
    assert done.err.count("ValueError: the data of rank 1 is bad") >= 2, "the log line and the traceback"
    assert f"RankFailedError: rank 1 on {HOST} failed: ValueError: the data of rank 1 is bad" in done.err
    assert done.code == 0, done.err
    # Both ranks write to one stream, so their lines may run together.
    assert [done.out.count(f"rank {rank} done, sum 2.0") for rank in (0, 1)] == [1, 1]
