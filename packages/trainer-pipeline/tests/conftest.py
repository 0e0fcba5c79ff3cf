"""Starts the worlds of the workers, each once, and hands out what their ranks have seen."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ports
import pytest

WORKERS = Path(__file__).parent / "workers"
PATHS = os.pathsep.join((str(WORKERS), str(Path(ports.__file__).parent)))
"""Where the workers and the tools of all tests are."""
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LIMIT = 300
"""Seconds that a launch may take."""


class World(NamedTuple):
    """Ranks that have ended."""

    notes: list[dict[str, Any]]
    """What each rank saw, by scenario."""
    codes: list[int]
    """Exit code of each rank; minus the signal that ended it."""
    ended: float
    """When the last one ended, in seconds since 1970."""
    told: str
    """What the ranks of the launch wrote to standard error."""
    folder: Path
    """Where the ranks wrote."""

    def seen(self, scenario: str) -> list[Any]:
        """What each rank saw in a scenario."""
        assert all(scenario in notes for notes in self.notes), self.told
        return [notes[scenario] for notes in self.notes]

    def errors(self, scenario: str) -> list[str]:
        """The error that a scenario gave each rank."""
        return [str(seen.get("error", "no error")) for seen in self.seen(scenario)]


def _launch(name: str, directory: Path) -> None:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHER_VARIABLES and not key.startswith(("TORCHELASTIC_", "NCCL_", "DIST_ENV_"))
    }
    # A safe path does not hold the folder of a script, where the workers share modules.
    environ = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    command = [sys.executable, str(WORKERS / "main.py"), name, str(directory)]
    with (directory / "told").open("wb") as told:
        subprocess.run(command, env=environ, stdout=told, stderr=told, timeout=LIMIT, check=False)


def _read(directory: Path, world: str) -> World:
    told = (directory / "told").read_text()
    folder = directory / world
    if not (folder / "codes.json").exists():
        pytest.fail(f"the world {world!r} did not come to an end:\n{told}")
    end = json.loads((folder / "codes.json").read_text())
    files = [folder / f"rank-{rank}.json" for rank in range(len(end["codes"]))]
    notes = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    return World(notes, end["codes"], end["ended"], told, folder)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], World]:
    """`world("two", "2")`: a world of a launch; processes that test side by side share launches.

    What only tests marked `full` look at runs in launches of their own.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    suffix = "" if request.node.get_closest_marker("full") is None else "-full"

    def get(launch: str, name: str) -> World:
        launch += suffix
        directory = root / f"launch-{launch}"
        directory.mkdir(exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / "told").exists():
                _launch(launch, directory)
        return _read(directory, name)

    return get


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.full)], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, world: Callable[[str, str], World]) -> World:
    """The world of so many ranks."""
    return world(request.param, {"two": "2", "four": "4"}[request.param])
