"""Nothing is left of a job whose launcher, or a rank of which, is killed; `kills.py` does it more often."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from resilience.kills import PROMISED, kill
from resilience.workload import Workload

SLOW_MACHINE_S = 120.0
"""A launcher looks at its ranks when it has imported torch: among other tests that takes half a minute."""


@pytest.mark.parametrize("target", ["launcher", pytest.param("rank in start-up", marks=pytest.mark.full)])
def test_nothing_is_left_of_a_job_that_is_killed_while_it_starts(target: str, tmp_path: Path) -> None:
    """A rank in training is killed in the tests of llama-pretrain."""
    work = Workload.write(tmp_path / "work", steps=1000)
    done = kill(
        target, work, tmp_path / "job", random.Random(0), start_seconds=3.0, within=PROMISED + SLOW_MACHINE_S
    )
    assert done.before
    assert done.left == []
