"""A dimension that the packages know nothing of, by public names: with sharding, the curve of one process."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_start import WarmStart

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
STEPS, SAVED = 6, 3
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRON = {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {
    "OMP_NUM_THREADS": "1"
}


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    start = WarmStart(["trainer_core.build", "trainer_fsdp2", "torch._dynamo"], ENVIRON)
    yield start
    start.close()


def points(warm: WarmStart, folder: Path, batch: int, mesh: str | None = None) -> list[list[float]]:
    """Loss and gradient norm of every logged step, which each rank prints alike."""
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    told = folder.with_name(f"{folder.name}-told-{mesh}")
    told.mkdir(exist_ok=True)
    ranks = [(str(rank), "4", str(rank), "4", "localhost", port) for rank in range(4)] if mesh else [()]
    words = [str(SCRIPT), str(folder), str(batch), *([mesh] if mesh else [])]
    started = [
        warm.start(
            words,
            ENVIRON | dict(zip(LAUNCHED, rank, strict=False)),
            told / f"out-{number}",
            told / f"err-{number}",
        )
        for number, rank in enumerate(ranks)
    ]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert set(codes) == {0}, "".join(path.read_text() for path in told.glob("err-*"))
    printed = "".join((told / f"out-{number}").read_text() for number in range(len(ranks)))
    found = re.findall(r"points (.*)", printed)
    assert len(found) == len(ranks)
    assert len(set(found)) == 1
    curve: list[list[float]] = json.loads(found[0])
    return curve


def test_divided_mlps_and_sharded_weights_train_as_one_process(warm: WarmStart, tmp_path: Path) -> None:
    whole = points(warm, tmp_path / "whole", 8)
    assert len(whole) == STEPS
    assert any(norm > 0.5 for _, norm in whole), "gradients are clipped"
    together = points(warm, tmp_path / "together", 4, "shard=2,tp=2")
    for found, expected in zip(together, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(tmp_path / "together" / f"checkpoint-{STEPS}")
    resumed = points(warm, tmp_path / "together", 8)
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
