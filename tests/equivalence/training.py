"""How the trainer of a row is made, and what is read from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch._dynamo.utils import counters

from dist_env import DistributedEnvInterface, ParallelLayout
from trainer_core import DataParallelArguments, Trainer, TrainingArguments
from trainer_ddp import DDPTrainer
from trainer_fsdp2 import FSDP2Trainer
from trainer_pipeline import PipelineTrainer

from .case import Case
from .data import RaggedLoader, Shard
from .reference import Point, Recipe, decoder_of, evaluation_point

STOP_AT = 11
"""Where restarted rows stop: inside an epoch, whether of rows by eight or by twelve, with warm-up behind."""


TRAINERS: Mapping[str, type[Trainer]] = {
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "pipeline": PipelineTrainer,
}
"""Those that work on ranks."""


class Stop:
    """Asks for the end of the run after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            control.should_training_stop = True  # type: ignore[attr-defined]


def settings_of(recipe: Recipe) -> dict[str, object]:
    """The training arguments that a recipe stands for."""
    free = recipe.optimizer == "schedule_free_adamw"
    return {
        "seed": recipe.seed,
        "use_cpu": True,
        "max_steps": recipe.steps,
        "num_train_epochs": -1,
        "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "adam_beta1": recipe.betas[0],
        "adam_beta2": recipe.betas[1],
        "adam_epsilon": recipe.epsilon,
        "optim": recipe.optimizer,
        "ema_decay": recipe.ema_decay,
        "lr_scheduler_type": "constant_with_warmup" if free else "cosine",
        "warmup_steps": recipe.warmup,
        "max_grad_norm": recipe.max_grad_norm,
        "logging_steps": 1,
        "check_flops": False,
        "save_strategy": "no",
    }


def build(case: Case, directory: Path, *callbacks: object, **settings: object) -> Trainer:
    """The trainer of a row on this process alone.

    Args:
        case: The row.
        directory: Output directory.
        *callbacks: Beside those of the row.
        **settings: Win over those of the row.
    """
    known = {field.name for field in fields(TrainingArguments)}
    given = {**_settings(case, directory, ranks=1), **settings}
    arguments = {name: value for name, value in given.items() if name in known}
    batches, evaluation = _loaders(case)
    return Trainer(
        TrainingArguments(**arguments),  # type: ignore[arg-type]
        train_dataset=batches,
        eval_dataset=evaluation,
        **_options(case, *callbacks),  # type: ignore[arg-type]
    )


def build_on_rank(
    case: Case,
    directory: Path,
    env: DistributedEnvInterface,
    trainer: str,
    *callbacks: object,
    **settings: object,
) -> Trainer:
    """The trainer of a row on one of the ranks of an environment; its global batches are the same."""
    chosen = TRAINERS[trainer]
    known = {field.name for field in fields(chosen.arguments_class)}
    ranks = _data_ranks(chosen, settings.get("mesh"), env.world_size)
    given = {**_settings(case, directory, ranks=ranks), **settings}
    # A row that goes from one trainer to another has settings of both.
    arguments = cast(
        DataParallelArguments,
        chosen.arguments_class(**{name: value for name, value in given.items() if name in known}),  # type: ignore[arg-type]
    )
    batches, evaluation = _loaders(case)
    return chosen(
        arguments,
        train_dataset=_read_by(env, batches, dispatched=arguments.dispatch_batches),
        eval_dataset=_read_by(env, evaluation, dispatched=arguments.dispatches_evaluation),
        distributed_env=env,
        **_options(case, *callbacks),  # type: ignore[arg-type]
    )


def _data_ranks(trainer: type[Trainer], mesh: object, world_size: int) -> int:
    """Ranks that work on different data."""
    if isinstance(mesh, str):
        return ParallelLayout.parse(mesh).data_count
    return 1 if trainer is PipelineTrainer else world_size


def points_of(case: Case, trainer: Trainer) -> list[Point]:
    """What a trainer has logged, and what it gives the evaluation rows if the recipe asks for that."""
    points = curve(trainer.state.log_history)
    return [*points, evaluation_point(trainer.evaluate()["eval_loss"])] if case.recipe.evaluated else points


def curve(log_history: list[Mapping[str, object]] | list[dict[str, object]]) -> list[Point]:
    """One point for each logged optimizer step."""
    logged = [entry for entry in log_history if "loss" in entry]
    return [Point(float(entry["loss"]), float(entry["grad_norm"])) for entry in logged]  # type: ignore[arg-type]


@contextmanager
def compiled_as_told(case: Case) -> Iterator[None]:
    """A context for the training of a row on this process.

    Raises:
        RuntimeError: At its end, if something was compiled that should not be, or nothing that should.
    """
    torch._dynamo.reset()  # what other rows compiled would count as recompilations of this one
    counters.clear()
    yield
    if bool(case.settings.get("torch_compile")) != bool(counters["frames"]["ok"]):
        raise RuntimeError(f"{case.name}: {counters['frames']['ok']} frames were compiled")


def _settings(case: Case, directory: Path, *, ranks: int) -> dict[str, object]:
    accumulation, rest = divmod(case.accumulation, ranks)
    if rest:
        raise ValueError(f"{case.name}: {case.accumulation} microbatches are not the same for {ranks} ranks")
    return {
        **settings_of(case.recipe),
        "output_dir": str(directory),
        "per_device_train_batch_size": case.recipe.global_batch // case.accumulation,
        "gradient_accumulation_steps": accumulation,
        **case.settings,
    }


def _loaders(case: Case) -> tuple[RaggedLoader, RaggedLoader]:
    """Of training and evaluation."""
    rows = case.recipe.global_batch
    return (
        RaggedLoader(rows // case.accumulation, multiple=case.multiple),
        RaggedLoader(rows, seed=1, multiple=case.multiple),
    )


def _read_by(env: DistributedEnvInterface, loader: RaggedLoader, *, dispatched: bool) -> RaggedLoader | Shard:
    """What a rank is given: its part, if rank 0 does not read for all."""
    return loader if dispatched or env.world_size == 1 else Shard(loader, env.rank, env.world_size)


def _options(case: Case, *callbacks: object) -> dict[str, object]:
    options, recipe = dict(case.options()), case.recipe
    return {
        "model_init": partial(decoder_of, recipe),
        **options,
        "callbacks": [*options.pop("callbacks", ()), *callbacks],  # type: ignore[misc]
    }
