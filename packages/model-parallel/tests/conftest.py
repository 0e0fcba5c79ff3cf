"""Starts real jobs of gloo ranks from a process that has imported torch already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from warm_start import WarmStart

Done = subprocess.CompletedProcess[str]
WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))  # the models of the workers
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def imported() -> list[str]:
    """What the workers have imported when they start."""
    compiling = ["torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"]
    return ["torch.distributed.tensor", "torch.distributed.fsdp", *compiling, "dist_env", "model_parallel"]


@pytest.fixture(scope="session")
def warm(imported: list[str]) -> Iterator[WarmStart]:
    """Starts the workers."""
    start = WarmStart(imported, clean_environ())
    yield start
    start.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Callable[..., Done]:
    """`alone("-m", "model_parallel", "-h")`: one process without launcher variables, to its end."""

    def run(*words: str | Path) -> Done:
        folder = tmp_path_factory.mktemp("alone")
        out, err = folder / "out", folder / "err"
        process = warm.start([*map(str, words)], clean_environ(), out, err)
        try:
            code = process.wait(240.0)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Callable[..., list[Any]]:
    """`launch("train.py", 2, case)` gives each rank a JSON value, and returns what each of them noted."""

    def run(worker: str | Path, ranks: int, *cases: object, timeout: float = 240.0) -> list[Any]:
        port = str(free_port())
        folder = tmp_path_factory.mktemp("job")
        path = WORKERS / worker
        started = []
        for rank in range(ranks):
            values = (str(rank), str(ranks), str(rank), str(ranks), "localhost", port)
            environ = clean_environ() | dict(zip(LAUNCHED, values, strict=True))
            environ |= {"NOTES": str(folder / f"notes-{rank}"), "PYTHONPATH": str(WORKERS)}
            words = [str(path), json.dumps(cases)]
            started.append(warm.start(words, environ, folder / f"out-{rank}", folder / f"err-{rank}"))
        try:
            codes = [process.wait(timeout) for process in started]
        finally:
            for process in started:
                process.kill()
        assert set(codes) == {0}, "".join(each.read_text()[-4000:] for each in sorted(folder.glob("err-*")))
        return [json.loads((folder / f"notes-{rank}").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def python() -> Callable[..., Done]:
    """The same of an interpreter that has imported nothing."""

    def run(*words: str | Path) -> Done:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, env=clean_environ(), capture_output=True, text=True, timeout=240, check=False
        )

    return run
