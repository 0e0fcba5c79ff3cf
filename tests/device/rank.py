"""One rank of a run on the fake device: `python -m tests.device.rank SCENARIO DIRECTORY`.

A scenario is a function and a trainer, as in `train-ddp`, and maybe a precision, as in `train-ddp:fp16`.
What it saw goes to `<scenario>-rank<r>.json` in the directory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakecuda
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataloader_dispatch import DataloaderDispatcher
from dist_env import DistributedEnvironment, device_check, examination, examine, point_to_point
from model_parallel.draws import Draws, share_generators
from perf_metrics.utilization import gather_over_ranks
from tests.device.case import SETTINGS, Model, Stop, WaitsByBatch, WaitsByStep, curve, experts, llama, rows
from trainer_core import ContextParallel, TensorParallel, Trainer
from trainer_core.distributed.transforms import ReplicaGradSync
from trainer_ddp import CompressionArguments, DDPTrainer, DDPTrainingArguments, DiLoCoArguments
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments
from trainer_pipeline.schedules import StageLayout
from trainer_pipeline.stage_forward import ActivationChannel, run_forward

TRAINERS: dict[str, tuple[type[Trainer], type[Any], dict[str, Any]]] = {
    "ddp": (DDPTrainer, DDPTrainingArguments, {"per_device_train_batch_size": 4}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {"per_device_train_batch_size": 4}),
    "powersgd": (
        DDPTrainer,
        DDPTrainingArguments,
        {
            "per_device_train_batch_size": 4,
            "compression": CompressionArguments(method="powerSGD", start_step=2, matrix_rank=2),
        },
    ),
    "offload": (
        FSDP2Trainer,
        FSDP2TrainingArguments,
        {"per_device_train_batch_size": 4, "fsdp2": FSDP2Arguments(cpu_offload=True)},
    ),
    "diloco": (
        DDPTrainer,
        DDPTrainingArguments,
        {
            "per_device_train_batch_size": 4,
            "diloco": DiLoCoArguments(enabled=True, inner_steps=2),
        },
    ),
    "tensor": (DDPTrainer, DDPTrainingArguments, {"mesh": "tp=2", "fused_loss": "chunked"}),
    "context": (FSDP2Trainer, FSDP2TrainingArguments, {"mesh": "cp=2"}),
    "ring": (FSDP2Trainer, FSDP2TrainingArguments, {"mesh": "cp=2"}),
    "experts": (DDPTrainer, DDPTrainingArguments, {"per_device_train_batch_size": 4}),
    "exchange": (
        FSDP2Trainer,
        FSDP2TrainingArguments,
        {"per_device_train_batch_size": 4, "mesh": "shard=2,ep=2"},
    ),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"pipeline": PipelineArguments(schedule="1f1b", n_microbatches=4)},
    ),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "tensor": {"model_init": llama, "parallel": [TensorParallel(sequence=True)]},
    "context": {"model_init": llama},
    "ring": {"model_init": llama, "parallel": [ContextParallel(exchange="ring")]},
    "experts": {"model_init": experts},
    "exchange": {"model_init": experts},
}
"""What else a trainer is given."""


def build(
    name: str,
    directory: Path,
    env: DistributedEnvironment | None,
    *callbacks: object,
    eval_dataset: object = None,
    model_init: Callable[[], torch.nn.Module] = Model,
    **given: Any,
) -> Trainer:
    name, _, precision = name.partition(":")
    trainer, arguments, own = TRAINERS[name]
    mixed = {"mixed_precision": precision} if precision else {}
    args = arguments(output_dir=str(directory), **{**SETTINGS, **own, **mixed, **given})
    return trainer(
        args,
        train_dataset=rows(),
        eval_dataset=eval_dataset,
        distributed_env=env,
        callbacks=list(callbacks),
        **{"model_init": model_init, **OPTIONS.get(name, {})},
    )


def train(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """The curve, and where the model was."""
    trainer = build(name, directory / name, env)
    trainer.train()
    devices = {str(value.device) for value in trainer.model.parameters()}
    return {"curve": curve(trainer), "devices": sorted(devices), "backend": dist.get_backend()}


def resume(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """Two halves, with an asynchronous save between them, and the whole."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    build(name, directory / "parts", env, Stop(3), **saving).train()
    second = build(name, directory / "parts", env, **saving)
    second.train()
    whole = build(name, directory / "whole", env)
    whole.train()
    return {"curve": curve(second), "whole": curve(whole)}


def waits(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """What the host waited for in steps without a log."""
    watch = WaitsByStep()
    build(name, directory / name, env, watch, logging_steps=1000, max_steps=8).train()
    return {"steps": len(watch.by_step), "late": list(watch.late())}


def evaluate(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """The losses of evaluations, and what the host waited for between their batches."""
    watch = WaitsByBatch()
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = build(name, directory / name, env, watch, eval_dataset=rows(40), **settings)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    late = [wait for waits in watch.by_batch for wait in waits]
    return {"losses": losses, "batches": len(watch.by_batch), "late": late}


def dispatched(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """A run whose first rank reads for both; the other one receives into pinned buffers."""
    watch = WaitsByStep()
    quiet = {"dispatch_batches": True, "logging_steps": 1000, "max_steps": 8}
    trainer = build(name, directory / name, env, watch, **quiet)
    trainer.train()
    again = build(name, directory / "logged", env, dispatch_batches=True)
    again.train()
    return {"curve": curve(again), "late": list(watch.late())}


LATE_SECONDS = 0.5
"""What the other rank has long gone past, if it does not wait."""


class LateOnRank1(Model):
    """Rank 1 comes to its gradients late, so that a sum that is not waited for lacks them."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(LATE_SECONDS)
        return super().forward(input_ids)


def late(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """Weights of the replicas when one of them is late in each step; backward passes on the main thread."""
    with torch.autograd.set_multithreading_enabled(False):
        trainer = build(name, directory / name, env, max_steps=4, model_init=LateOnRank1)
        trainer.train()
    return {"weights": [parameter.double().sum().item() for parameter in trainer.model.parameters()]}


def handover(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """Tensors that go from rank to rank while one of them is late, and what is kept of them."""
    group, on_time = dist.group.WORLD, env.rank == 0
    assert group is not None
    # A hidden state of 32 MiB, more than connections hold, whose memory is used again at once.
    layout = StageLayout(ranks=2, stages_per_rank=1, style="loop")
    channel = ActivationChannel(layout, env.rank, group, group, env.device)
    hidden = torch.full((8 << 20,), 3.0, device=env.device)
    received = []

    def compute(stage: int, microbatch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        received.extend([] if given is None else [given.min().item(), given.max().item()])
        return hidden if stage == 0 else None

    time.sleep(0.0 if on_time else LATE_SECONDS)
    run_forward(layout, env.rank, channel, 1, compute)
    hidden.zero_()

    # Gradients that replicas of a stage sum.
    dist.barrier()
    part = torch.nn.Linear(4, 1, device=env.device)
    for parameter in part.parameters():
        parameter.grad = torch.full_like(parameter, env.rank + 1.0)
    time.sleep(0.0 if on_time else LATE_SECONDS)
    sync = ReplicaGradSync(group)
    sync.after_backward(part, last=True)
    sync.finish()
    summed = [parameter.grad.tolist() for parameter in part.parameters() if parameter.grad is not None]

    # Hidden states of a text, in the memory of the device.
    trainer = build("pipeline", directory / "pipeline", env)
    prompt, held = torch.arange(64).remainder(50)[None], []
    for _ in range(2):
        trainer.pipeline_generate(prompt, max_new_tokens=8, do_sample=False)
        gc.collect()  # what only refers to itself
        held.append(torch.cuda.memory_allocated())
    return {"received": received, "summed": summed, "held": held}


def delivered(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """Batches that rank 0 sends: in one message, in several, and to a rank that computes on the host."""
    batches = [{"values": torch.arange(size, dtype=torch.int64)} for size in (1000, 200_000, 500_000, 300)]
    mesh, found = init_device_mesh("cuda", (2,)), {}
    for device in (env.device, torch.device("cpu")):
        loader = torch.utils.data.DataLoader(batches, batch_size=None) if env.rank == 0 else None
        dispatcher: Any = DataloaderDispatcher(loader, mesh, device, dp_mesh_dim=None)
        passed = iter(dispatcher)
        with fakecuda.recorded_waits() as seen:
            taken = [next(passed)["values"] for _ in batches]
        found[device.type] = {
            "waits": [f"{wait.what} at {wait.where}" for wait in seen],
            "right": [
                torch.equal(one.cpu(), batch["values"]) for one, batch in zip(taken, batches, strict=True)
            ],
            "pinned": [one.is_pinned() for one in taken],
        }
        dispatcher.close()
    return found


def groups(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """Collectives of an nccl group on tensors of the device and of the host."""
    rank, size = env.rank, env.world_size
    here = torch.full((4,), float(rank + 1), device=env.device)
    dist.all_reduce(here)
    gathered = torch.empty(2 * size, device=env.device)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=env.device))
    scattered = torch.empty(1, device=env.device)
    dist.reduce_scatter_tensor(scattered, torch.arange(float(size), device=env.device))
    work = dist.all_reduce(moved := torch.ones(3, device=env.device), async_op=True)
    work.wait()
    dist.barrier()
    told = gather_over_ranks([float(rank), 0.1])
    drawn = Draws(mesh := init_device_mesh("cuda", (size,)))
    torch.cuda.manual_seed(rank)
    share_generators(mesh)
    drawn.begin(here)
    own = torch.rand(4, device=env.device)
    with drawn.alike():
        alike = torch.rand(4, device=env.device)
    drawn.end()
    after = torch.rand(4, device=env.device)
    refused = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(2), 0),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2)),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            refused.append(str(error))
    return {
        "backend": dist.get_backend(),
        "reduced": here.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "moved": moved.tolist(),
        "told": told,
        "own": own.tolist(),
        "alike": [alike.tolist(), after.tolist()],
        "refused": refused,
    }


def timed(name: str, directory: Path, env: DistributedEnvironment) -> dict[str, Any]:
    """By part of the doctor: how often the host had waited for the device at each reading of the clock."""
    found: dict[str, list[int]] = {}

    def clock(read: list[int]) -> float:
        read.append(sum(wait.what == "synchronize" for wait in fakecuda.waits))
        return time.perf_counter()

    for part in (device_check, examination, point_to_point):
        read = found[part.__name__.rpartition(".")[2]] = [0]
        part.time = SimpleNamespace(perf_counter=partial(clock, read), monotonic=time.monotonic)  # type: ignore[assignment]
    examine(env, max_bytes=65536)
    return found


SCENARIOS: dict[str, Callable[[str, Path, DistributedEnvironment], dict[str, Any]]] = {
    "train": train,
    "resume": resume,
    "waits": waits,
    "evaluate": evaluate,
    "dispatched": dispatched,
    "delivered": delivered,
    "late": late,
    "handover": handover,
    "groups": groups,
    "timed": timed,
}


def without_environment(name: str, directory: Path) -> dict[str, Any]:
    """A trainer that finds its ranks itself: in a group that is there already, then from the launcher."""
    found = []
    for path in ("joined", "launched"):
        if path == "joined":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = f"file://{directory / 'store'}"
            dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size)
        trainer = build(name, directory / path, None, max_steps=1)
        trainer.train()
        found.append(sorted({str(value.device) for value in trainer.model.parameters()}))
        if path == "joined":
            dist.destroy_process_group()
    return {"devices": found}


def main(scenario: str, directory: str) -> None:
    kind, _, name = scenario.partition("-")
    if kind == "alone":
        seen, rank = without_environment(name, Path(directory)), int(os.environ["RANK"])
    else:
        with DistributedEnvironment() as env:
            seen, rank = SCENARIOS[kind](name, Path(directory), env), env.rank
            torch.cuda.synchronize()
    seen["races"] = [f"{race.what} at {race.where}" for race in fakecuda.races]
    (Path(directory) / f"{scenario}-rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
