"""A dimension that the packages know nothing of, by public names: with sharding, the curve of one process."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
STEPS, SAVED = 6, 3


def points(folder: Path, batch: int, mesh: str | None = None) -> list[list[float]]:
    """Loss and gradient norm of every logged step, which each rank prints alike."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in launched}
    done = subprocess.run(
        [
            *(sys.executable, *(TORCHRUN if mesh else ()), str(SCRIPT), str(folder), str(batch)),
            *([mesh] if mesh else []),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=variables | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"points (.*)", done.stdout)
    assert len(told) == (4 if mesh else 1)
    assert len(set(told)) == 1
    found: list[list[float]] = json.loads(told[0])
    return found


def test_divided_mlps_and_sharded_weights_train_as_one_process(tmp_path: Path) -> None:
    whole = points(tmp_path / "whole", 8)
    assert len(whole) == STEPS
    assert any(norm > 0.5 for _, norm in whole), "gradients are clipped"
    together = points(tmp_path / "together", 4, "shard=2,tp=2")
    for found, expected in zip(together, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(tmp_path / "together" / f"checkpoint-{STEPS}")
    resumed = points(tmp_path / "together", 8)
    for found, expected in zip(resumed[-(STEPS - SAVED) :], whole[SAVED:], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_transform_is_small_and_uses_public_names() -> None:
    text = SCRIPT.read_text()
    body = text[text.index("class TensorParallelMLPs") : text.index("\n\n\nclass MLP")]
    assert len(body.splitlines()) < 60
    packages = ("trainer_core", "trainer_fsdp2", "dist_env", "checkpoint_core")
    imported = re.findall(rf"from ((?:{'|'.join(packages)})[\w.]*) import", text)
    assert imported
    assert all("." not in module for module in imported)
    assert not re.search(r"\._[a-z]", inspect.cleandoc(body))
