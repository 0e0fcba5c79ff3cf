"""Modules of this folder import one another; processes are forked from one that has imported torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_start import WarmStart

sys.path.append(str(Path(__file__).parents[1]))

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """The variables of a process that belongs to no job."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {
        "OMP_NUM_THREADS": "1"
    }


@pytest.fixture(scope="session")
def warm(environ: dict[str, str]) -> Iterator[WarmStart]:
    """Starts `llama_pretrain`."""
    trainers = ("trainer_ddp", "trainer_fsdp2", "trainer_pipeline")
    start = WarmStart(["llama_pretrain.train", *trainers, "torch._dynamo", "matplotlib.figure"], environ)
    yield start
    start.close()
