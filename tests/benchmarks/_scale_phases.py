"""What the ranks do while their messages are counted: the control code, from start to resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from _scale_counts import own_slot
from _scale_transport import Job, settle
from torch.distributed.device_mesh import DeviceMesh

from checkpoint_core import CheckpointConfig, CheckpointManager, SharingPattern, StateComponent
from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader
from dist_env import HostSums, StaticDistributedEnvironment
from dist_env.coordination import current_coordinator
from dist_env.liveness import liveness_of
from trainer_core.distributed.ranks import Ranks

STEPS = 4
"""Optimizer steps that are counted together, and divided by their number."""
FLAGS = 6
_PARAMETERS = 8
_TIMEOUT_SECONDS = 3600.0

PHASES: Mapping[str, str] = {
    "start": "start-up: ranks find one another, default group",
    "facts": "check of equal facts",
    "sums": "opening the sums of hosts",
    "flags": "flags, per step",
    "log": "figures of each rank, per log entry",
    "liveness": "liveness, per second",
    "manager": "opening the checkpoint manager",
    "save": "checkpoint: planning and commit",
    "resume": "checkpoint: selection and load",
    "data": "data agreement: opening and first batch",
    "data step": "data agreement, per step",
    "dispatch open": "dispatch: opening",
    "dispatch": "dispatch from rank 0: a pass of 5 steps",
}


class Values:
    """State of a few tensors and numbers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], **numbers: object) -> None:
        self.tensors = dict(tensors)
        self.numbers = numbers

    def state_dict(self) -> dict[str, object]:
        return {**self.tensors, **self.numbers}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.numbers = {name: value for name, value in state.items() if name not in self.tensors}


def scenario(job: Job, rank: int, folder: Path) -> None:
    """All phases on one rank; collective."""
    with job.phase("start"):
        env = job.open_default_group(rank)
    ranks = Ranks(env)
    facts = {"learning_rate": 1e-3, "seed": 1, "model": {f"parameter {n}": "[8, 8]" for n in range(64)}}
    with job.phase("facts"):
        ranks.check_same(facts)
    with job.phase("sums"):
        ranks._hosts = HostSums(env)  # as `connect` does, which also makes the groups of devices
    for _ in range(STEPS):
        with job.phase("flags"):
            ranks.any([False] * FLAGS)
    with job.phase("log"):
        ranks.gather([float(rank)])
    _liveness(job)
    _checkpoints(job, env, folder)
    _data(job, rank)
    _dispatch(job, rank)


def _liveness(job: Job) -> None:
    """Two rounds a second of what the thread that answers does while nobody asks."""
    slot = own_slot()
    slot.is_paused = True
    liveness = liveness_of(current_coordinator())
    liveness.stop()
    job.meet()
    slot.is_paused = False
    with job.phase("liveness"):
        for _ in range(2):
            liveness._listen()
    # Here they are the whole traffic, and as many as seconds say.
    slot.counts.request(slot.counts.poll_bytes, slot.counts.polls)


def _components(rank: int, world_size: int) -> list[StateComponent]:
    model = {f"layers.{n}.weight": torch.zeros(4) for n in range(_PARAMETERS)}
    part = {f"layers.{n}.of.{rank}": torch.zeros(1) for n in range(2)}
    return [
        StateComponent(key="model", stateful=Values(model), sharing_pattern=SharingPattern.REPLICATED),
        StateComponent(
            key="optimizer", stateful=Values(part if rank < 2 else {}), sharing_pattern=SharingPattern.SHARDED
        ),
        StateComponent(key="trainer", stateful=Values({}, step=1), sharing_pattern=SharingPattern.GLOBAL),
    ]


def _checkpoints(job: Job, env: StaticDistributedEnvironment, folder: Path) -> None:
    config = CheckpointConfig(output_dir=folder / "run", timeout_seconds=_TIMEOUT_SECONDS)
    with job.phase("manager"):
        manager = CheckpointManager(config, stateful_provider=_components(env.rank, env.world_size), dist=env)
    with job.phase("save"):
        manager.save_checkpoint(1)
    with job.phase("resume"):
        manager.load_checkpoint()
    manager.close()


def _batches(rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    return [{"tokens": torch.full((64,), rank * count + n)} for n in range(count)]


def _data(job: Job, rank: int) -> None:
    with job.phase("data"):
        loader = SynchronizedDataLoader(_batches(rank, STEPS + 2), "cpu", timeout_seconds=_TIMEOUT_SECONDS)
        batches = iter(loader)
        next(batches)
    for _ in range(STEPS):
        with job.phase("data step"):
            next(batches)
    batches.close()  # type: ignore[attr-defined]
    job.meet()


def _dispatch(job: Job, rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(job.size), mesh_dim_names=("dp",), _init_backend=False, _rank=rank)
    count = job.size * (STEPS + 1)
    with job.phase("dispatch open"):
        dispatcher = DataloaderDispatcher(
            _batches(0, count) if rank == 0 else None,
            mesh,
            "cpu",
            "dp",
            prefetch=1,
            timeout_seconds=_TIMEOUT_SECONDS,
        )
    with job.phase("dispatch"):
        taken = sum(1 for _ in dispatcher)
    assert taken == STEPS + 1
    settle()
    job.meet()
    dispatcher.close()
    job.meet()
