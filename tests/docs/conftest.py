"""Runs scripts and commands of the pages, alone or as ranks, from a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ports import free_port
from warm_start import WarmStart

# Modules of this folder import one another.
sys.path.append(str(Path(__file__).parent))

LIMIT = 300.0
"""Seconds that a script may take."""
LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
OURS = ("llama_pretrain", "checkpoint_core", "dataloader_dispatch", "dist_env", "perf_metrics")
TRAINERS = ("trainer_core", "trainer_ddp", "trainer_fsdp2", "trainer_pipeline", "torch._dynamo")
# What the pages use beside our packages, in the modules that their examples end up in.
THEIRS = (
    *("accelerate", "lightning.pytorch", "peft", "transformers.trainer"),
    *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
)

Run = Callable[..., list["subprocess.CompletedProcess[str]"]]


def _environ(**job: str) -> dict[str, str]:
    """The variables outside of any job that this process may belong to, and those of a job."""
    outside = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return outside | {"OMP_NUM_THREADS": "1"} | job


def _runner(warm: WarmStart, factory: pytest.TempPathFactory) -> Run:
    def run(*words: str, ranks: int = 0) -> list[subprocess.CompletedProcess[str]]:
        folder = factory.mktemp("told")
        # What a page leaves in new temporary directories goes when pytest removes its own.
        place = {"TMPDIR": str(factory.getbasetemp())}
        port = str(free_port())
        size = str(ranks)
        job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        jobs = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        files = [(folder / f"out-{number}", folder / f"err-{number}") for number in range(len(jobs))]
        running = [
            warm.start(words, _environ(**place, **job), *told) for job, told in zip(jobs, files, strict=True)
        ]
        try:
            codes = [process.wait(LIMIT) for process in running]
        finally:
            for process in running:
                process.kill()
        texts = [(out.read_text(), err.read_text()) for out, err in files]
        return [
            subprocess.CompletedProcess(words, code, *text) for code, text in zip(codes, texts, strict=True)
        ]

    return run


def _warm(modules: Sequence[str]) -> Iterator[WarmStart]:
    start = WarmStart(modules, _environ())
    yield start
    start.close()


@pytest.fixture(scope="session")
def _warm_with_ours() -> Iterator[WarmStart]:
    yield from _warm((*OURS, *TRAINERS))


@pytest.fixture(scope="session")
def _warm_with_theirs() -> Iterator[WarmStart]:
    yield from _warm((*OURS, *TRAINERS, *THEIRS))


@pytest.fixture(scope="session")
def run(_warm_with_ours: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run("train.py", ranks=2)`, `run("-m", "module")`: one process a rank, or one without a job."""
    return _runner(_warm_with_ours, tmp_path_factory)


@pytest.fixture(scope="session")
def run_with_theirs(_warm_with_theirs: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same where what the pages use beside us is imported, which takes as long as torch."""
    return _runner(_warm_with_theirs, tmp_path_factory)
