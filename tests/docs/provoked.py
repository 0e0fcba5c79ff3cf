"""The smallest thing that goes wrong in each way, so that the packages say what the page quotes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
    load_model_weights,
)
from checkpoint_core.background import StagingBuffer
from checkpoint_core.directory import check_space
from checkpoint_core.errors import describe_error
from dataloader_dispatch import DocumentStream, StreamLoader
from dataloader_dispatch.synchronized.epoch import same_first_batches
from dist_env import (
    DistributedEnvironment,
    RankStatus,
    StallReport,
    StaticDistributedEnvironment,
)
from dist_env.coordination import Coordinator, RankRecord
from dist_env.device import check_visible
from dist_env.handshake import check_agreement
from dist_env.rank_report import RankReport, find_warnings
from dist_env.tree_sums import Link
from hardware_table.detection import DetectedDevice
from hardware_table.resolve import resolve_peak
from llama_pretrain import PretrainArguments
from llama_pretrain.arguments import check_processes
from llama_pretrain.cli import main
from llama_pretrain.run_directory import RunDirectory
from perf_metrics import compare_flops, diagnose
from trainer_core import (
    DataParallelArguments,
    DivergenceDetector,
    Trainer,
    TrainingArguments,
    arguments_from_dict,
    dump_on_oom,
)

IDS = (torch.arange(32)[:, None] + torch.arange(8)) % 64
DATA = [{"input_ids": row, "labels": row} for row in IDS]


class Bigram(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.next = torch.nn.Embedding(64, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.next(input_ids)  # type: ignore[no-any-return]


class Broken(Bigram):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * float("nan")


class Products(Bigram):
    """A model with something to multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(input_ids))  # type: ignore[no-any-return]


class Boom:
    def on_step_end(self, *_: object, **__: object) -> None:
        raise ValueError("mine")


class Plain:
    """A loader without a state."""

    batch_size = 8

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": rows, "labels": rows} for rows in IDS.view(4, 8, 8))

    def __len__(self) -> int:
        return 4


class Wrong(torch.nn.Sequential):
    def flops_per_token(self, sequence_length: int) -> float:
        return 3 * 6 * 64 * 64


SGD = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}


def train(
    output_dir: str, *callbacks: object, model: Any = Bigram, given: Mapping[str, Any] = {}, **settings: Any
) -> Trainer:
    usual = {"max_steps": 2, "per_device_train_batch_size": 8, "use_cpu": True, "seed": 1}
    args = TrainingArguments(output_dir=output_dir, **{**usual, **settings})
    parts = {"model_init": model, "train_dataset": DATA, **given}
    trainer = Trainer(args, callbacks=callbacks, **parts)
    trainer.train()
    return trainer


def go_on(**settings: Any) -> None:
    """A second start in the directory of a run that has saved."""
    train("runs")
    train("runs", **settings)


def load(damage: Callable[[Path], object]) -> None:
    """A load of a checkpoint that something has happened to."""
    train("runs")
    checkpoint = Path("runs/checkpoint-2")
    damage(checkpoint)
    train("runs", max_steps=4, resume_from_checkpoint=str(checkpoint))


def manager(*trained: torch.Tensor, model: torch.nn.Module | None = None) -> CheckpointManager:
    pattern, model = SharingPattern.REPLICATED, model or torch.nn.Linear(2, 2)
    parts = [StateComponent(key="model", stateful=ModelState(model), sharing_pattern=pattern, required=True)]
    if trained:
        state = OptimizerState(torch.optim.AdamW(trained), model)
        parts.append(StateComponent(key="optimizer", stateful=state, sharing_pattern=pattern))
    return CheckpointManager(CheckpointConfig(output_dir="runs"), stateful_provider=parts)


def in_bfloat16() -> None:
    load_model_weights(torch.nn.Linear(2, 2, dtype=torch.bfloat16), manager().save_checkpoint(1))


def all_damaged() -> None:
    (Path(manager().save_checkpoint(1)) / "model.safetensors").write_bytes(b"")
    manager().load_checkpoint()


def of_another_run() -> None:
    manager().save_checkpoint(1)
    manager().save_checkpoint(1)


def other_parameters() -> None:
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    manager(model.weight, model=model).save_checkpoint(1)
    manager(model.bias, model=model).load_checkpoint()


def only_a_pickle() -> None:
    Path("hf").mkdir()
    torch.save({}, "hf/pytorch_model.bin")
    load_model_weights(torch.nn.Linear(2, 2), "hf")


def other_data() -> None:
    source: dict[str, Any] = {"sequence_length": 8, "encode": str.encode, "eos_token_id": 0}
    one, two = (StreamLoader(DocumentStream(["text"] * 8, **source, seed=s), batch_size=2) for s in (1, 2))
    two.load_state_dict(one.state_dict())


def without_a_state() -> None:
    for steps in (2, 4):
        train("runs", max_steps=steps, given={"train_dataset": Plain()})


def other_epochs() -> None:
    train("runs", max_steps=-1, num_train_epochs=1)
    train("runs", max_steps=-1, num_train_epochs=2, per_device_train_batch_size=16)


def too_large_for_fp16() -> None:
    length: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 20}
    train("runs", model=Broken, nonfinite_policy="skip", mixed_precision="fp16", **length)


def nothing_to_score() -> None:
    masked = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in DATA]
    train("runs", given={"eval_dataset": masked}, eval_strategy="steps", eval_steps=1)


def without_memory() -> None:
    with dump_on_oom("runs/mine/memory"):
        raise torch.OutOfMemoryError


def open_environment(**settings: Any) -> None:
    with DistributedEnvironment(no_accelerator=True, **settings):
        pass


def without_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    open_environment(rank=0, world_size=2, master_port=port, init_timeout=3.0)


def on_a_taken_port() -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it, which is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 29500)))
        open_environment(master_port=29500)


def twice() -> None:
    with DistributedEnvironment(no_accelerator=True):
        open_environment()


def record(**facts: Any) -> RankRecord:
    usual = {"rank": 0, "host": "node0", "pid": 1, "token": "", "world_size": 2, "backend": "nccl"}
    return RankRecord(**{**usual, "device": "cuda:0", "device_identity": None, **facts})


def meet(**other: Any) -> None:
    records = [record(device_identity="one"), record(rank=1, device_identity="two")]
    records[1] = replace(records[1], **other)
    check_agreement({each.rank: each for each in records})


def wait_for_the_end() -> None:
    store = torch.distributed.HashStore()
    store.set("rank/1", record(rank=1, host="node1").to_text())
    Coordinator(store, record()).barrier([0, 1], "world", 0.01, "end of training")


def ask_for_failures() -> None:
    store = torch.distributed.HashStore()
    Coordinator(store, record(rank=1, host="node1")).fail(ValueError("mine"))
    Coordinator(store, record()).raise_if_failed()


def exchange() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Link(socket.create_connection(server.getsockname()), "rank 1 on node0", 5.0)
        there = Link(server.accept()[0], "rank 0 on node0", 5.0)
    there.send(12, [1.0, 2.0])
    try:
        here.receive(12, 3)
    finally:
        here.close()
        there.close()


def stall(*missing: int, phase: str) -> StallReport:
    place: dict[str, Any] = {"host": "node0", "state": "running", "step": 2, "phase": phase}
    ranks = tuple(RankStatus(rank=rank, order=0, age=310.0, **place) for rank in range(4))
    return StallReport(ranks=ranks, missing=missing, seconds=310.0)


def doctor(count: int, environ: Mapping[str, str] = {}, *, loopback: bool = False, **variables: str) -> str:
    """What the doctor warns of, with two ranks on each node."""
    facts = {
        "device": "cpu",
        "backend": "gloo",
        "python": "3.11",
        "torch": "2.13",
        "collective_library": None,
    }
    reports = [
        RankReport(
            rank=rank,
            local_rank=rank % 2,
            host=f"node{rank // 2}",
            interface="lo",
            loopback=loopback and rank > 1,
            variables=variables,
            **facts,  # type: ignore[arg-type]
        )
        for rank in range(count)
    ]
    return "\n".join(find_warnings(reports, environ))


def unheard_of() -> str:
    device = DetectedDevice(name="NVIDIA Unheard", backend="cuda", index=0, units=10, total_memory=1)
    return resolve_peak(device, config_path=Path("hardware.yaml")).explanation


def counted_wrongly() -> str | None:
    model = Wrong(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64, bias=False))
    return compare_flops(model, 8).warning()


def another_rate() -> None:
    directory, args = RunDirectory("runs/mine"), PretrainArguments(output_dir="runs/mine")
    directory.begin(args, {})
    Path("runs/mine/checkpoint-8").mkdir()
    directory.begin(replace(args, learning_rate=0.01), {})


def in_a_used_directory() -> None:
    Path("notes").mkdir()
    for name in ("a.txt", "b.txt"):
        Path("notes", name).write_text("a text")
    main(["train", "--data", "notes", "--output-dir", "notes"])


SAID: dict[str, Callable[[], object]] = {
    "needs 4 processes": lambda: check_processes("ddp", "dp=4", 2),
    "trainer='single' runs in one": lambda: check_processes("single", "", 2),
    "a Trainer for one device": lambda: train(
        "runs", given={"distributed_env": StaticDistributedEnvironment(rank=0, world_size=2)}
    ),
    "is set but RANK is not": lambda: DistributedEnvironment(world_size=2),
    "SLURM_NTASKS=8": lambda: doctor(1, {"SLURM_NTASKS": "8"}),
    "visible cuda devices": lambda: check_visible(4, 4, kind="cuda", rank=4, mapped=False),
    "both use cuda:0": lambda: meet(device_identity="one"),
    "joining the job": without_a_rank,
    "replicate=3 needs": lambda: Trainer(
        DataParallelArguments(output_dir="runs", use_cpu=True, mesh="dp=3"),
        model_init=Bigram,
        distributed_env=StaticDistributedEnvironment(rank=0, world_size=8),
    ),
    "Address already in use": on_a_taken_port,
    "which cannot serve": lambda: DistributedEnvironment(backend="nccl", no_accelerator=True),
    "backend differs": lambda: meet(rank=3, backend="gloo"),
    "the loopback interface": lambda: doctor(4, loopback=True),
    "NCCL_IB_DISABLE": lambda: doctor(4, NCCL_IB_DISABLE="1"),
    "exists already": twice,
    "missing: rank 2": lambda: stall(2, phase="data"),
    "at the same place": lambda: stall(phase="backward"),
    "is at its exchange": exchange,
    "barrier 'end of training'": wait_for_the_end,
    "failed: ValueError": ask_for_failures,
    "the callback Boom": lambda: train("runs", Boom()),
    "nor any later one": lambda: train("runs", model=Broken),
    "every one of the last 2": lambda: train("runs", model=Broken, nonfinite_policy="skip"),
    "at any loss scale": lambda: train(
        "runs",
        model=Broken,
        nonfinite_policy="skip",
        mixed_precision="fp16",
        num_train_epochs=20,
        max_steps=-1,
    ),
    "DivergenceDetector": lambda: train(
        "runs", DivergenceDetector(), model=Broken, nonfinite_policy="skip", logging_steps=1
    ),
    "gave 2 batches": nothing_to_score,
    "learning_rate: 5e-05 before": lambda: go_on(
        learning_rate=0.1, max_steps=4, allow_changes=("learning_rate",)
    ),
    "learning_rate=0.1 was 5e-05": lambda: go_on(learning_rate=0.1),
    "max_steps: 2 before": lambda: go_on(max_steps=4),
    "8 before, 16 now": lambda: go_on(max_steps=4, num_train_epochs=-1, per_device_train_batch_size=16),
    "keeps no position": without_a_state,
    "the same first batch": lambda: same_first_batches(["a", "a"], [0, 1]),
    "casting 2 tensors": in_bfloat16,
    "what held it": without_memory,
    "the staging buffer grows": lambda: StagingBuffer().copy({"a": torch.zeros(250_000)}),
    "NVIDIA Unheard": unheard_of,
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": lambda: doctor(2, TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    "model FLOPs of Wrong": counted_wrongly,
    "16486 bytes": lambda: load(lambda path: os.truncate(path / "model.safetensors", 16486)),
    "match its checksum": lambda: load(lambda path: (path / "model.safetensors").write_bytes(bytes(16496))),
    "has no manifest.json": lambda: load(lambda path: (path / "manifest.json").unlink()),
    "none can be used": all_damaged,
    "checkpoints but is not one itself": lambda: go_on(resume_from_checkpoint="runs"),
    "wrong shape: next.weight": lambda: go_on(max_steps=4, model=lambda: Bigram(63)),
    "not those of the checkpoint": other_parameters,
    "it was saved with seed=1": other_data,
    "a pickle that is never read": only_a_pickle,
    "seed=2 was 1": lambda: go_on(seed=2),
    "optimizer='SGD'": lambda: go_on(given=SGD),
    "16 examples a step": other_epochs,
    "starts another run beside": lambda: go_on(resume_from_checkpoint=False),
    "was begun with 0.002": another_rate,
    "output_dir='notes'": in_a_used_directory,
    "written by another run (": of_another_run,
    "not enough space": lambda: check_space(Path("runs"), 10**15),
    "no space left": lambda: describe_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/mine")),
    "'--max-step'": lambda: main(["train", "--max-step", "3"]),
    "max_step=3": lambda: arguments_from_dict(TrainingArguments, {"max_step": 3}),
    "max_steps='3'": lambda: train("runs", max_steps="3"),
    "torch_compile_mode=": lambda: train("runs", torch_compile_mode="max-autotune"),
    "eval_steps=5": lambda: train("runs", eval_steps=5),
    "ddp.static_graph": lambda: main(["train", "--ddp.static-graph"]),
    "together with an optimizer": lambda: train("runs", learning_rate=0.1, given=SGD),
    "cannot be combined with max_grad_norm": lambda: train(
        "runs", fuse_optim_with_backward=True, max_grad_norm=1.0
    ),
    **dict.fromkeys(
        ("MFU/OFU = ", "recomputation not counted", "whole tiles in OFU", "MFU and OFU agree"),
        lambda: diagnose(mfu=0.30, ofu=0.40),
    ),
}
