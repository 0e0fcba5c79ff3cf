"""What one of the processes does: it trains the rows that it is given, one after another."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path

from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    open_object_store,
)

from .case import Case
from .reference import Point
from .training import STOP_AT, Stop, build_on_rank, compiled_as_told, points_of


class Part(Enum):
    """Which part of a run is trained."""

    WHOLE = auto()
    FIRST = auto()
    """To the step where restarted rows stop."""
    SECOND = auto()


@dataclass(frozen=True)
class Job:
    """A row for one rank."""

    case: Case
    directory: Path
    part: Part
    rank: int
    world_size: int
    port: int
    environ: Mapping[str, str]
    """Set on this rank alone."""
    home: Path | None = None
    """Where this rank runs; None where this process does."""


@dataclass(frozen=True)
class Failure:
    """What a rank answers instead of a curve."""

    traceback: str


def serve(connection: Connection, log: str) -> None:
    """Answer each job with a curve or a `Failure`, until nobody gives jobs any more.

    Args:
        connection: Where jobs come from.
        log: File for all that this process writes.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    gc.freeze()  # collecting garbage then leaves out what was imported
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            answer: list[Point] | Failure = _train_as_rank(job)
        except Exception:  # noqa: BLE001  # it is told to whoever gave the job
            answer = Failure(traceback.format_exc())
        gc.collect()  # trainers are full of cycles, and hold threads and connections
        connection.send(answer)


def train_alone(case: Case, directory: Path, part: Part) -> list[Point]:
    """Train a row with its trainer for ranks on this process."""
    return _train(case, directory, part, StaticDistributedEnvironment())


def _trainer_of(case: Case, part: Part) -> str:
    return (case.next_trainer or case.trainer) if part is Part.SECOND else case.trainer


def _mesh_of(case: Case, part: Part) -> str | None:
    moves = case.next_trainer is not None or case.next_world_size is not None
    return case.next_mesh if part is Part.SECOND and moves else case.mesh


def _train_as_rank(job: Job) -> list[Point]:
    # As torchrun sets them.
    for name, value in {
        "RANK": job.rank,
        "LOCAL_RANK": job.rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": job.port,
        **job.environ,
    }.items():
        os.environ[name] = str(value)
    open_object_store.cache_clear()  # the variables may name another one
    opened = DistributedEnvironment(no_accelerator=True, init_timeout=120, training_timeout=120)
    with chdir(job.home or Path.cwd()), opened as env:
        return _train(job.case, job.directory, job.part, env)


def _train(case: Case, directory: Path, part: Part, env: DistributedEnvInterface) -> list[Point]:
    stop = [Stop(STOP_AT)] if part is Part.FIRST else []
    settings = {"mesh": _mesh_of(case, part)} | ({} if part is Part.WHOLE else {"save_strategy": "steps"})
    with compiled_as_told(case):
        trainer = build_on_rank(case, directory, env, _trainer_of(case, part), *stop, **settings)
        trainer.train()
    began, expected = trainer.state.session_start_step, STOP_AT if part is Part.SECOND else 0
    if began != expected:
        raise RuntimeError(f"{case.name}: began at step {began}, not at {expected}")
    return points_of(case, trainer)
