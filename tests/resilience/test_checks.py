"""What the scenario leans on: curves are compared in full, and its disk and its damage are real."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resilience.checkpoints import DAMAGES, Checkpoints
from resilience.curve import KEYS, curve, largest_deviations
from resilience.disk import Disk

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    find_latest_checkpoint,
)
from dist_env import StaticDistributedEnvironment

WRITER = """
import sys
input()
with open(sys.argv[1], "wb") as file:
    file.write(bytes(10**6))
"""


def logged(folder: Path, losses: dict[int, float]) -> Path:
    folder.mkdir()
    entries = [{"global_step": step, **dict.fromkeys(KEYS, loss)} for step, loss in losses.items()]
    (folder / "trainer_logs.json").write_text(json.dumps(entries))
    return folder


def test_deviations_are_the_largest_of_all_steps(tmp_path: Path) -> None:
    whole = logged(tmp_path / "whole", {1: 4.0, 2: 2.0, 3: 1.0})
    other = logged(tmp_path / "other", {1: 4.0, 2: 2.5, 3: 1.1})
    assert largest_deviations(whole, whole, 3) == dict.fromkeys(KEYS, 0.0)
    assert largest_deviations(other, whole, 3) == pytest.approx(dict.fromkeys(KEYS, 0.25))


def test_steps_that_are_missing_or_too_many_are_seen(tmp_path: Path) -> None:
    whole = logged(tmp_path / "whole", {1: 4.0, 2: 2.0, 3: 1.0})
    gap = logged(tmp_path / "gap", {1: 4.0, 3: 1.0})
    with pytest.raises(ValueError, match=r"3 steps are logged as \[1, 3\]"):
        largest_deviations(gap, whole, 3)
    with pytest.raises(ValueError, match=r"only one of the curves has: \[3\]"):
        largest_deviations(logged(tmp_path / "short", {1: 4.0, 2: 2.0}), whole, 2)
    entries = json.loads((whole / "trainer_logs.json").read_text())
    (gap / "trainer_logs.json").write_text(json.dumps([*entries, entries[1]]))
    with pytest.raises(ValueError, match="not each once"):
        curve(gap, "loss")


@pytest.mark.parametrize("user", [0, 1000], ids=["may mount", "may not"])
def test_a_full_disk_refuses_writes(user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with Disk(tmp_path / "disk") as disk:
        for full in (True, False):
            line = [sys.executable, "-c", WRITER, str(disk.folder / "file")]
            with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
                if full:
                    disk.fill([writer.pid])
                _, told = writer.communicate("\n")
            disk.free()
            expected = "No space left on device" if disk.is_mounted else "File too large"
            assert (expected in told) is full, told
            assert (writer.returncode != 0) is full


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", range(5))
def test_damage_makes_the_one_before_the_newest(how: str, seed: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    component = StateComponent(
        key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.REPLICATED
    )
    with CheckpointManager(
        CheckpointConfig(output_dir=tmp_path, save_total_limit=None),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider([component]),
    ) as manager:
        for step in (3, 6, 9):
            manager.save_checkpoint(step)
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.good() == [3, 6, 9]
        assert checkpoints.damage_newest(how, random.Random(seed)).startswith(f"{how}: checkpoint-9/")
        assert (checkpoints.good(), checkpoints.damaged()) == ([3, 6], [9])
        assert find_latest_checkpoint(tmp_path, verify_checksums=True) == tmp_path / "checkpoint-6"
        manager.save_checkpoint(9)
        assert (checkpoints.good(), checkpoints.damaged()) == ([3, 6, 9], [])
