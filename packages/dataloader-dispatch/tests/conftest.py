"""Starts real jobs of several ranks over gloo; settings that all tests share."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis.configuration import set_hypothesis_home_dir
from ports import free_port
from warm_start import WarmStart

from dist_env import forget_warnings

# On a busy machine the threads of one operation wait for one another longer than they work.
torch.set_num_threads(1)
# Without this, every run would leave a directory of examples in the working tree.
set_hypothesis_home_dir(tempfile.gettempdir())

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Rank:
    """A rank that has ended.

    Attributes:
        code: Exit status; negative for the signal that killed it.
        out: Standard output.
        err: Standard error.
        seconds: From the start of the job to its end.
        note: What it wrote as JSON to the path in the variable ``NOTE``; None if nothing.
    """

    code: int
    out: str
    err: str
    seconds: float
    note: Any


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts the workers."""
    modules = ["dispatch.dispatcher", "synchronized.evaluation", "cli.tokenize"]
    start = WarmStart([f"dataloader_dispatch.{module}" for module in modules], _environ())
    yield start
    start.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Callable[..., list[Rank]]:
    """`launch("worker.py", 4, "argument")`: one process a rank, with torchrun's variables and ``NOTE``."""

    def run(worker: str, ranks: int, *arguments: object, timeout: float = 120) -> list[Rank]:
        folder = tmp_path_factory.mktemp("job")
        port = str(free_port())
        start = time.monotonic()
        words = [str(WORKERS / worker), *map(str, arguments)]
        running = [
            warm.start(
                words,
                _environ(rank, ranks, port, folder / f"note-{rank}.json"),
                folder / f"out-{rank}",
                folder / f"err-{rank}",
            )
            for rank in range(ranks)
        ]
        ended = []
        try:
            for rank, process in enumerate(running):
                code = process.wait(timeout)
                texts = [(folder / f"{name}-{rank}").read_text() for name in ("out", "err")]
                note = folder / f"note-{rank}.json"
                ended.append(
                    Rank(
                        code,
                        *texts,
                        time.monotonic() - start,
                        json.loads(note.read_text()) if note.exists() else None,
                    )
                )
        finally:
            for process in running:
                process.kill()
        return ended

    return run


def _environ(rank: int = 0, ranks: int = 1, port: str = "", note: Path | None = None) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "NOTE": str(note),
        "OMP_NUM_THREADS": "1",
        # A safe path does not hold the script's folder, where some workers have further modules.
        "PYTHONPATH": str(WORKERS),
    }
    return {**os.environ, **variables}


@pytest.fixture
def ordinary_user() -> Callable[[], AbstractContextManager[None]]:
    """A context in which this process is a user without the superuser's right to read everything."""

    @contextmanager
    def drop() -> Iterator[None]:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return drop


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
