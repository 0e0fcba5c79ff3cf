"""The two ranks of the scenarios, and a group of one rank in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class TwoRanks:
    """What both ranks found, by scenario, and the folder with their checkpoints."""

    notes: list[dict[str, dict[str, object]]]
    folder: Path

    def of(self, scenario: str) -> list[dict[str, object]]:
        """What each rank found in one scenario."""
        return [notes[scenario] for notes in self.notes]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """All scenarios, run once."""
    folder = tmp_path_factory.mktemp("compression")
    done = subprocess.run(
        [sys.executable, str(WORKERS / "two_ranks.py"), str(folder)],
        # Workers import their neighbours, also where PYTHONSAFEPATH keeps the folder of a script out.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKERS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return TwoRanks([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], folder)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
