"""All batches of an optimizer step in one call of the executor, and one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import Scenario
from tiny import COMMON, LENGTH, VOCABULARY, WIDTH, Batches, Tiny, alone, curve, once, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface
from trainer_core import BuiltModel, CausalLMLoss, GradSync, Trainer
from trainer_pipeline import PipelineArguments, PipelineStages, PipelineTrainingArguments
from trainer_pipeline.diagram.table import compute_actions
from trainer_pipeline.schedules import schedule_kind

LAYERS = 8
TIED = partial(Tiny, LAYERS, tied=True)
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipe_v",
)
ALIKE = (LENGTH,) * 3
UNLIKE = (LENGTH, LENGTH, LENGTH - 1, LENGTH)


class Kept(PipelineStages):
    """Stages that let others see what was built."""

    built: BuiltModel

    def apply(self, built: BuiltModel) -> None:
        """Cut the model."""
        super().apply(built)
        self.built = built


class Told(GradSync):
    """Notes what it is told of each part."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.names = {id(part): number for number, part in enumerate(parts)}
        self.calls: list[tuple[str, int, bool]] = []

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        """Note it."""
        self.calls.append(("before", self.names[id(part)], last))

    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        """Note it."""
        self.calls.append(("after", self.names[id(part)], last))

    def finish(self) -> None:
        """Note it."""
        self.calls.append(("finish", -1, True))


def batches_of(lengths: Sequence[int], rows: int) -> list[dict[str, Tensor]]:
    """Batches of rows of these lengths, of which some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, : len(found) + 1] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, by name."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def stepped(
    env: DistributedEnvInterface, folder: Path, *, schedule: str, lengths: Sequence[int], n: int
) -> object:
    """What a step computes of all batches at once, and of one after the other; and how."""
    pipeline = PipelineArguments(schedule=schedule, n_microbatches=n)
    stages = Kept()
    trainer = Trainer(
        PipelineTrainingArguments(**COMMON, output_dir=str(folder), pipeline=pipeline),  # type: ignore[arg-type]
        model_init=partial(Tiny, LAYERS),
        train_dataset=Batches(),
        distributed_env=env,
        callbacks=[],
        parallel=[stages],
    )
    model = trainer.unwrapped_model()
    built = stages.built
    executor: Any = built.executor
    batches, loss, tokens = batches_of(lengths, n), CausalLMLoss(), torch.tensor(50.0)

    def run(some: Sequence[dict[str, Tensor]]) -> tuple[float, list[str]]:
        fired: list[str] = []
        total = executor.forward_backward(some, loss, denominator=tokens, fire=fired.append)
        return float(total), fired

    built.grad_sync = told = Told(built.parts)
    executor.timer.recording = recorded = []
    total, fired = run(batches)
    together = {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }
    built.zero_grad()
    built.grad_sync = GradSync()
    executor.timer.recording = None
    separate = sum(run([batch])[0] for batch in batches)
    apart = gradients_of(model)
    held = [
        info.buffer.numel()
        for made in executor._schedules.values()
        for stage in getattr(made, "_stages", None) or [made._stage]
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if getattr(info, "source", None) is not None
    ]
    sizes = [1 + max(work.microbatch for work in each.work) for each in recorded]
    ran = [[(work.stage, work.kind, work.microbatch) for work in each.work] for each in recorded]
    known = [compute_actions(schedule_kind(schedule), env.world_size, size)[env.rank] for size in sizes]
    return {
        "losses": [total, separate],
        "gradients": [
            max(float((together[name] - apart[name]).abs().max()) for name in apart),
            max(float(value.abs().max()) for value in apart.values()),
            set(together) == set(apart),
        ],
        "microbatches": sizes,
        "ran": ran,
        "by the table": [[(each.stage, each.kind, each.microbatch) for each in rank] for rank in known],
        "fired": fired,
        "sync": told.calls,
        "held": held,
    }


class Placed(Tiny):
    """Adds a parameter of the model itself to the embedding."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.learned = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.embed.register_forward_hook(lambda _, __, found: found + self.learned[: found.shape[1]])


def trained(
    env: DistributedEnvInterface,
    folder: Path,
    accumulation: int,
    pipelines: int = 1,
    make: Callable[[], nn.Module] = TIED,
    **settings: object,
) -> object:
    """The curve beside one process; the last window of an epoch has fewer batches, and the last is short."""
    given = {"max_steps": 4, "train": Batches(38)}
    trainer = trainer_of(
        env,
        folder,
        make,
        gradient_accumulation_steps=accumulation,
        **{**given, **settings},  # type: ignore[arg-type]
    )
    trainer.train()

    def of_one() -> list[object]:
        own = alone(env, folder, make, gradient_accumulation_steps=accumulation * pipelines, **given)  # type: ignore[arg-type]
        own.train()
        return curve(own)

    return {"curves": [curve(trainer), once(env, f"{make}, {accumulation * pipelines}", of_one)]}


OF_TWO: dict[str, Scenario] = {
    **{f"step, {name}": partial(stepped, schedule=name, lengths=ALIKE, n=4) for name in SCHEDULES},
    "step, unlike": partial(stepped, schedule="1f1b", lengths=UNLIKE, n=4),
    # 9 microbatches do not divide into rounds of 2 ranks, 6 do.
    "step, rounds": partial(stepped, schedule="interleaved_1f1b", lengths=ALIKE, n=3),
    "trained, 1f1b": partial(trained, accumulation=3),
    "trained, zbv": partial(trained, accumulation=3, schedule="zbv"),
}
OF_FOUR: dict[str, Scenario] = {
    "trained, replicas": partial(trained, accumulation=2, pipelines=2, replicas=2),
    "trained, pp=4": partial(trained, accumulation=3, mesh="pp=4"),
    "trained, pp=2,dp=2": partial(trained, accumulation=2, pipelines=2, mesh="pp=2,dp=2"),
    # By trainer-fsdp2.
    "trained, pp=2,shard=2": partial(trained, accumulation=2, pipelines=2, mesh="pp=2,shard=2"),
    "trained, own parameters": partial(
        trained, accumulation=2, pipelines=2, mesh="pp=2,shard=2", make=Placed
    ),
}
