"""Starts real jobs: torchrun, or bare processes with the variables set by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ports import free_port
from warm_start import WarmStart

WORKERS = Path(__file__).parent / "workers"
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
    def codes(self) -> list[int]:
        return [process.code for process in self.processes]

    @property
    def err(self) -> str:
        return "".join(process.err for process in self.processes)


def clean_environ(**extra: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("TORCHELASTIC_", "NCCL_", "DIST_ENV_"))
    }
    quiet = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning"}
    return kept | quiet | {"OMP_NUM_THREADS": "1"} | extra


def run_to_end(command: Sequence[str], timeout: float, environ: Mapping[str, str]) -> Finished:
    start = time.monotonic()
    done = subprocess.run(
        command, env=clean_environ(**environ), capture_output=True, text=True, timeout=timeout, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


@pytest.fixture(autouse=True)
def no_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def usual_port_taken() -> Iterator[bool]:
    """A silent listener at 29501; yields False if another program of this machine has the port already."""
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            squatter.bind(("127.0.0.1", 29501))
            squatter.listen()
        except OSError:
            yield False
        else:
            yield True


@pytest.fixture(scope="session")
def python() -> Callable[..., Finished]:
    """`python("-m", "dist_env", "doctor", NAME="value")`: one process without launcher variables."""

    def run(*arguments: str, timeout: float = 60.0, **environ: str) -> Finished:
        return run_to_end([sys.executable, *arguments], timeout, environ)

    return run


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., Finished]:
    """`torchrun(4, "-m", "dist_env", "doctor", NAME="value")`."""

    def run(ranks: int, *command: str, timeout: float = 120.0, **environ: str) -> Finished:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return run_to_end([*line, *command], timeout, environ)

    return run


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts the workers."""
    start = WarmStart(["dist_env.environment", "dist_env.heartbeat", "dist_env.doctor"], clean_environ())
    yield start
    start.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Callable[..., Job]:
    """`launch("exchange.py", 4)`: bare processes with the six variables set; a worker may write notes.

    In place of a worker `("-m", "dist_env")` names a module. `unset` names variables to leave out.
    """

    def run(
        worker: str | tuple[str, ...],
        ranks: int,
        *arguments: str,
        unset: Sequence[str] = (),
        timeout: float = 120.0,
        **more: str,
    ) -> Job:
        script = [str(WORKERS / worker)] if isinstance(worker, str) else list(worker)
        port = str(free_port())
        folder = tmp_path_factory.mktemp("job")
        processes = []
        start = time.monotonic()
        for rank in range(ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
                "NOTES": str(folder / f"notes-{rank}.json"),
            }
            environ = {k: v for k, v in clean_environ(**(variables | more)).items() if k not in unset}
            told = (folder / f"out-{rank}", folder / f"err-{rank}")
            processes.append(warm.start([*script, *arguments], environ, *told))
        seconds = []
        try:
            for process in processes:
                process.wait(timeout)
                seconds.append(time.monotonic() - start)
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
