"""Processes that die with the one that started them: killed, at any moment, none of them is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_env import die_with_parent_command, die_with_parent_context, tie_loader_workers

WORKERS = Path(__file__).parent / "workers"
PATIENCE = 60.0
PROMISED = 2.0 + 8.0
"""Seconds after which nothing is left of what was killed, and what a busy machine may add."""


def is_alive(pid: int) -> bool:
    """Not a zombie either, which nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Family:
    """A process that starts others, which leave their process ids in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parent: subprocess.Popen[bytes] | None = None

    def start(self, mode: str, *launcher: str) -> None:
        script = [str(WORKERS / "parents.py"), str(self.folder), mode]
        self.parent = subprocess.Popen(
            [sys.executable, *launcher, *script], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def members(self, count: int) -> dict[tuple[str, str], int]:
        """Process ids by name and number, as soon as there are so many."""
        deadline = time.monotonic() + PATIENCE
        while len(found := list(self.folder.iterdir())) < count:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return {(path.stem, path.suffix): int(path.suffix[1:]) for path in found}

    def kill(self) -> None:
        assert self.parent is not None
        self.parent.kill()
        self.parent.wait()

    def end(self) -> None:
        self.kill()
        for path in self.folder.iterdir():
            if is_alive(int(path.suffix[1:])):
                os.kill(int(path.suffix[1:]), signal.SIGKILL)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    family.end()


def left_after_the_promised_time(pids: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    deadline = time.monotonic() + PROMISED
    while (left := [name for name, pid in pids.items() if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_children_live_as_long_as_their_process_and_not_as_the_thread_that_started_them(
    family: Family,
) -> None:
    """Also loader workers that torch does not watch yet, and children that still import the program."""
    family.start("parent")
    pids = family.members(9)
    time.sleep(0.6)  # the threads are over, and those that watch have looked
    assert all(map(is_alive, pids.values()))
    assert sorted(name for name, _ in pids) == [
        "command",
        "forked",
        "forked-by-thread",
        *["importing"] * 3,
        "loader-of-thread0",
        "loader0",
        "parent",
    ]
    family.kill()
    assert left_after_the_promised_time(pids) == []


def test_ranks_of_torchrun_die_with_it_and_what_they_started_on_purpose_does_not(family: Family) -> None:
    family.start("rank", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    pids = family.members(3)
    family.kill()
    # torch ends nobody here.
    assert left_after_the_promised_time({key: pid for key, pid in pids.items() if key[0] == "rank"}) == []
    alive = [name for (name, _), pid in pids.items() if is_alive(pid)]
    assert alive == ["background", "background"]


def test_a_loader_keeps_what_it_was_told() -> None:
    items = torch.arange(6)
    initialised = multiprocessing.get_context("fork").Queue()
    loader = torch.utils.data.DataLoader(items, 2, num_workers=2, worker_init_fn=initialised.put)
    assert tie_loader_workers(loader) is loader
    assert torch.cat(list(loader)).tolist() == items.tolist()
    assert {initialised.get(timeout=PATIENCE) for _ in range(2)} == {0, 1}
    loader = torch.utils.data.DataLoader(items, num_workers=1, multiprocessing_context="spawn")
    assert tie_loader_workers(loader).multiprocessing_context is die_with_parent_context("spawn")

    class Own(multiprocessing.context.SpawnContext):
        pass

    own = Own()
    loader = torch.utils.data.DataLoader(items, num_workers=1, multiprocessing_context=own)
    assert tie_loader_workers(loader).multiprocessing_context is own
    assert tie_loader_workers(torch.utils.data.DataLoader(items)).multiprocessing_context is None
    assert tie_loader_workers([items]) == [items]


def test_wrong_use_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"method='thread' is not a start method here\. Choose fork or spawn"
    ):
        die_with_parent_context("thread")
    told: list[str] = []

    def call() -> None:
        try:
            die_with_parent_command(["true"])
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "Start the command from the main thread" in told[0]
