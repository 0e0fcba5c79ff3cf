"""Starts worlds of real ranks, joined by gloo, from a process that has imported torch already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_start import WarmStart

WORKERS = Path(__file__).parent / "workers"
SECONDS = 300.0

Launch = Callable[[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def _warm() -> Iterator[WarmStart]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    modules = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "trainer_core"]
    start = WarmStart(modules, env)
    yield start
    start.close()


@pytest.fixture(scope="session")
def launch(_warm: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`launch("clipping.py", 4)`: run a worker on so many ranks; what each of them has noted."""

    def run(worker: str, ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("world")
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "FOLDER": str(folder)}
        errors = [folder / f"err-{rank}" for rank in range(ranks)]
        processes = [
            _warm.start(
                [str(WORKERS / worker)], env | {"RANK": str(rank)}, folder / f"out-{rank}", errors[rank]
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0] * ranks, "".join(path.read_text() for path in errors)
        return [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(ranks)]

    return run
