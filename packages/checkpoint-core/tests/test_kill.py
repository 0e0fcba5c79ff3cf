"""A save may die at any instant; what was committed before stays, and the next save cleans up."""

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_core import find_latest_checkpoint
from checkpoint_core.directory import DELETED, REPLACED, STAGING, temporary_path


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("one", 12),
        ("async", 12),
        ("two-ranks", 8),
        ("nodes", 8),
        pytest.param("one-writer", 60, marks=pytest.mark.full),
    ],
)
def test_kills_at_random_instants(
    run_worker: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, mode: str, kills: int
) -> None:
    options = ["--kills", kills, "--mode", mode, "--seed", 7, "--timeout", 4]
    done = run_worker("kill_driver.py", tmp_path / "job", *options, timeout=900)
    result = json.loads(done.stdout)
    print(result)
    assert result["failures"] == []
    assert sum(result["phases"].values()) == result["kills"]
    assert kills <= result["kills"] <= 4 * kills
    # The kills must have hit saves, and left something to clean, or nothing was tested.
    assert result["phases"].get("between saves", 0) <= result["kills"] // 2
    assert len(result["phases"]) >= 3
    assert result["leftovers_cleaned"] >= 1
    assert result["saves"] >= kills
    assert result.get("one_rank_only", 0) == (0 if mode in ("one", "async") else result["kills"] // 6)


def of_a_dead_process(path: Path) -> Path:
    """The same name, as a process with this id but another start time would have made it."""
    head, start, token = path.name.rsplit("-", 2)
    return path.with_name(f"{head}-{int(start) + 1}-{token}")


def of_another_machine(path: Path) -> Path:
    parts = path.name.split("-")
    parts[3] = "0123abcd"
    return path.with_name("-".join(parts))


def test_only_leftovers_of_dead_processes_are_removed(job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = job()
    first.manager.save_checkpoint(1)
    living = temporary_path(run, STAGING, 2)
    dead = [of_a_dead_process(temporary_path(run, kind, 2)) for kind in (STAGING, DELETED)]
    elsewhere, idle = (of_another_machine(temporary_path(run, STAGING, 2)) for _ in range(2))
    foreign = run / ".tmp-checkpoint-2"
    for path in (living, *dead, elsewhere, idle, foreign):
        path.mkdir()
        (path / "part.json").write_text("{}")
    long_ago = time.time() - 7200
    os.utime(idle / "part.json", (long_ago, long_ago))
    os.utime(idle, (long_ago, long_ago))
    first.manager.save_checkpoint(3)
    hidden = {path for path in run.iterdir() if path.name.startswith(".")}
    assert hidden == {living, elsewhere, foreign}


def test_interrupted_replacement_is_put_back(job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    first = job()
    first.train(1)
    committed = first.save()
    # Killed between its two renames: the old one is aside, the new one still hidden.
    committed.rename(of_a_dead_process(temporary_path(run, REPLACED, 1)))
    of_a_dead_process(temporary_path(run, STAGING, 1)).mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_latest_checkpoint(run, verify_checksums=True) == committed
    assert "is back" in caplog.text
    second = job()
    assert second.manager.load_checkpoint().step == 1
    second.train(1)
    second.save()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_a_replacement_under_way_is_not_disturbed(job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = job()
    first.manager.save_checkpoint(1)
    second = first.manager.save_checkpoint(2)
    aside = temporary_path(run, REPLACED, 2)
    second.rename(aside)
    assert find_latest_checkpoint(run).name == "checkpoint-1"
    assert aside.is_dir()
