"""Runs the workers once for all tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

WORKERS = Path(__file__).parent / "workers"


class Ranks(NamedTuple):
    """What the ranks of a worker saw, by scenario."""

    seen: list[dict[str, object]]
    directory: Path
    errors: str

    def agreed(self, scenario: str) -> object:
        """What all ranks saw alike."""
        first, *others = [rank[scenario] for rank in self.seen]
        assert all(other == first for other in others), [first, *others]
        return first


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the ranks have written what they saw, and their error output."""
    directory = tmp_path_factory.mktemp("worlds")
    done = subprocess.run(
        [sys.executable, str(WORKERS / "main.py"), str(directory)],
        # A safe path does not hold the script's folder, where the other modules are.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKERS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stderr


@pytest.fixture(scope="session")
def two(worlds: tuple[Path, str]) -> Ranks:
    """What two ranks saw."""
    return _seen(worlds[0] / "two", worlds[1])


@pytest.fixture(scope="session")
def four(worlds: tuple[Path, str]) -> Ranks:
    """What four ranks on two hosts saw."""
    return _seen(worlds[0] / "four", worlds[1])


def _seen(directory: Path, errors: str) -> Ranks:
    seen = [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]
    return Ranks(seen, directory, errors)


@pytest.fixture(scope="session")
def jobs() -> Callable[[str], object]:
    """The module of the workers' training job, for a job of one process."""
    sys.path.insert(0, str(WORKERS))
    try:
        import jobs as module
    finally:
        sys.path.remove(str(WORKERS))
    return module
