"""A profile of a running job: whoever asks for it, all ranks record the same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf_metrics import read_breakdown


def test_ranks_record_the_same_steps_when_one_is_asked(launch: Callable[..., Any], tmp_path: Path) -> None:
    job = launch("profiled.py", 2, str(tmp_path), timeout=120)
    assert [process.code for process in job.processes] == [0, 0], job.told
    folder = tmp_path / "profile"
    # Asked for in steps 3 and 9: the next one warms up, and three are recorded.
    assert sorted(path.name for path in folder.glob("*.gz")) == [
        f"step-{step:08d}-rank{rank}.json.gz" for step in (7, 13) for rank in (0, 1)
    ]
    found = read_breakdown(tmp_path)
    assert [len(one.steps) for one in found.ranks] == [6, 6]
    assert found.notes == ()
    # The handler that sleeps on rank 1 is what the other waits for.
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.category) == (1, "host_gap")
    assert found.straggler.waiting_share > 0.3
