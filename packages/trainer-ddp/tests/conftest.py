"""Starts real jobs: torchrun, or bare processes with its variables set by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ports
import pytest
from warm_start import WarmStart

from dist_env import forget_warnings

WORKERS = Path(__file__).parent / "workers"
PATHS = os.pathsep.join((str(WORKERS), str(Path(ports.__file__).parent)))
"""Where the workers and the tools of all tests are."""
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Job:
    """A job that has ended: one entry per rank, and what its workers wrote down for each."""

    processes: list[Finished]
    notes: list[dict[str, object]]

    @property
    def told(self) -> str:
        """All that the ranks wrote."""
        return "".join(f"--- rank {i}\n{p.out}{p.err}" for i, p in enumerate(self.processes))


def clean_environ(**extra: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("TORCHELASTIC_", "NCCL_", "DIST_ENV_"))
    }
    # A safe path does not hold the folder of a script, where workers share a module.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS} | extra


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., Finished]:
    """`torchrun(2, "worker.py", "argument", options=["--max-restarts", "1"])`."""

    def run(
        ranks: int, worker: str, *arguments: str, options: Sequence[str] = (), timeout: float
    ) -> Finished:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*line, *options, str(WORKERS / worker), *arguments]
        start = time.monotonic()
        done = subprocess.run(
            command, env=clean_environ(), capture_output=True, text=True, timeout=timeout, check=False
        )
        return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    return run


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts the workers."""
    start = WarmStart(["trainer_ddp", "torch._dynamo"], clean_environ())
    yield start
    start.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Callable[..., Job]:
    """`launch("worker.py", 4, "argument")`: bare processes; a worker may write notes."""

    def run(worker: str, ranks: int, *arguments: str, timeout: float) -> Job:
        port, folder, start = str(ports.free_port()), tmp_path_factory.mktemp("job"), time.monotonic()
        processes = []
        for rank in range(ranks):
            place = (str(rank), str(rank), str(ranks), str(ranks), "localhost", port)
            environ = clean_environ(
                **dict(zip(LAUNCHER_VARIABLES, place, strict=True)), NOTES=str(folder / f"notes-{rank}.json")
            )
            told = (folder / f"out-{rank}", folder / f"err-{rank}")
            processes.append(warm.start([str(WORKERS / worker), *arguments], environ, *told))
        seconds = []
        try:
            for process in processes:
                process.wait(timeout=max(1.0, timeout - (time.monotonic() - start)))
                seconds.append(time.monotonic() - start)
        except subprocess.TimeoutExpired:
            texts = [(folder / f"err-{rank}").read_text() for rank in range(ranks)]
            pytest.fail(f"{worker} did not end within {timeout} s:\n" + "\n--- next rank\n".join(texts))
        finally:
            for process in processes:
                process.kill()
        finished = [
            Finished(
                process.returncode or 0,
                (folder / f"out-{rank}").read_text(),
                (folder / f"err-{rank}").read_text(),
                seconds[rank],
            )
            for rank, process in enumerate(processes)
        ]
        files = [folder / f"notes-{rank}.json" for rank in range(ranks)]
        return Job(finished, [json.loads(f.read_text()) if f.exists() else {} for f in files])

    return run


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
