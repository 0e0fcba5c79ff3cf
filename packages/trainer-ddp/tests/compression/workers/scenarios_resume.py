"""What powerSGD remembers over a restart, at the same and at another number of ranks."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch.distributed as dist
from model import Job, Model, batches, difference, equal, same_on_both, shard
from torch import Tensor

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from dist_env import StaticDistributedEnvironment
from trainer_ddp import CompressionArguments

SETTINGS = CompressionArguments(method="powerSGD", matrix_rank=2, start_step=3)
STEPS = 9


def _manager(job: Job, directory: Path) -> CheckpointManager:
    shared = SharingPattern.REPLICATED
    model = StateComponent(key="model", stateful=ModelState(job.model), sharing_pattern=shared)
    state = OptimizerState(job.optimizer, job.model)
    optimizer = StateComponent(key="optimizer", stateful=state, sharing_pattern=shared)
    rank = dist.get_rank()
    env = StaticDistributedEnvironment(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
    )
    return CheckpointManager(
        CheckpointConfig(output_dir=directory / "checkpoints", save_total_limit=None),
        dist=env,
        stateful_provider=StaticStatefulProvider([model, optimizer, *job.active.state_components()]),
    )


def _bucket_sizes(job: Job) -> list[str]:
    facts = job.ddp._get_ddp_logging_data()
    return [str(facts.get("bucket_sizes")), str(facts.get("rebuilt_bucket_sizes"))]


def restart(directory: Path) -> object:
    """Stopped before, at and after `start_step`; the weights continue bit for bit with other buckets."""
    samples = [shard(whole) for whole in batches(STEPS)]
    straight = Job(SETTINGS)
    manager = _manager(straight, directory)
    for done, batch in enumerate(samples, start=1):
        straight.step(batch, done)
        if done in (2, 3, 6):
            manager.save_checkpoint(done)
            owed = sum(float(error.double().sum()) for error in straight.state()["errors"].values())
    weights = {name: parameter.detach() for name, parameter in straight.model.named_parameters()}
    found: dict[str, object] = {
        "buckets": _bucket_sizes(straight),
        "same": same_on_both(weights),
        "errors at 6": owed,
    }
    for stop, cap in ((2, 0.002), (3, 0.002), (6, 0.002), (6, 0.01)):
        resumed = Job(SETTINGS, bucket_cap_mb=cap)
        loaded = _manager(resumed, directory).load_checkpoint(
            directory / "checkpoints" / f"checkpoint-{stop}"
        )
        assert loaded is not None
        resumed.active.begin(loaded.step)
        for done, batch in enumerate(samples[stop:], start=stop + 1):
            resumed.step(batch, done)
        again = {name: parameter.detach() for name, parameter in resumed.model.named_parameters()}
        state = resumed.state()
        found[f"from {stop}, {cap} MiB"] = {
            "equal": equal(weights, again)
            and all(equal(part, state[name]) for name, part in straight.state().items()),
            "missing": list(loaded.missing),
            "buckets": _bucket_sizes(resumed),
        }
    return found


def _from(job: Job, source: Job) -> None:
    job.model.load_state_dict(source.model.state_dict())
    # Loading shares the tensors it can.
    job.optimizer.load_state_dict(deepcopy(source.optimizer.state_dict()))


def _gathered(state: dict[str, dict[str, Tensor]]) -> list[dict[str, object]]:
    states: list[dict[str, object] | None] = [None, None]
    dist.all_gather_object(states, state)
    return [each for each in states if each is not None]


def _weights(job: Job) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()}


def _pair() -> tuple[Job, Job, list[Tensor]]:
    """A job of both ranks, one of this rank alone, and data; in float64, where rounding is out of the way."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    two = Job(SETTINGS, model=Model().double())
    one = Job(SETTINGS, model=Model().double(), group=alone)
    return two, one, [whole.double() for whole in batches(STEPS)]


def fewer(directory: Path) -> object:
    """From two ranks to one, which sees the whole batches: the same weights."""
    two, one, samples = _pair()
    _, forgetful, _ = _pair()
    for done, whole in enumerate(samples[:5], start=1):
        two.step(shard(whole), done)
    for job in (one, forgetful):
        _from(job, two)
        job.active.begin(5)
    one.active.load_resharded(_gathered(two.state()), rank=0, world_size=1)
    start = _weights(two)
    for done, whole in enumerate(samples[5:], start=6):
        two.step(shard(whole), done)
        one.step(whole, done)
        forgetful.step(whole, done)
    return {
        "difference": difference(_weights(one), _weights(two)),
        "without the errors": difference(_weights(forgetful), _weights(two)),
        "moved": difference(_weights(two), start),
    }


def more(directory: Path) -> object:
    """From one rank to two, which share the batches: the same weights."""
    two, one, samples = _pair()
    for done, whole in enumerate(samples[:5], start=1):
        one.step(whole, done)
    _from(two, one)
    two.active.begin(5)
    two.active.load_resharded([one.active.state_dict()], rank=dist.get_rank(), world_size=2)
    for done, whole in enumerate(samples[5:], start=6):
        one.step(whole, done)
        two.step(shard(whole), done)
    return {"difference": difference(_weights(two), _weights(one))}


def strange_wrapper(directory: Path) -> object:
    """A compression that was built for another model."""
    job, other = Job(SETTINGS), Job(CompressionArguments())
    try:
        job.active.register(other.ddp)
    except ValueError as error:
        return str(error)
    return None


RESUME = [restart, fewer, more, strange_wrapper]
