"""How a row is run; `Case.runner` names one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from trainer_core import Trainer, TrainingArguments

from .cases import Case
from .data import GLOBAL_BATCH, RaggedLoader
from .model import Decoder
from .reference import Point, Recipe, train

Runner = Callable[[Case, Path], list[Point]]
STOP_AT = 24
"""Where restarted rows stop: inside an epoch, with warm-up behind them."""


class Stop:
    """Asks for the end of the run after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            control.should_training_stop = True  # type: ignore[attr-defined]


def settings_of(recipe: Recipe) -> dict[str, object]:
    """The training arguments that a recipe stands for."""
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
        "lr_scheduler_type": "cosine",
        "warmup_steps": recipe.warmup,
        "max_grad_norm": recipe.max_grad_norm,
        "logging_steps": 1,
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
    rows = GLOBAL_BATCH // case.accumulation
    options = dict(case.options())
    given = {
        **settings_of(case.recipe),
        "output_dir": str(directory),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": case.accumulation,
        **case.settings,
        **settings,
    }
    return Trainer(
        TrainingArguments(**given),  # type: ignore[arg-type]
        model_init=lambda: Decoder(tied=case.recipe.tied),
        train_dataset=RaggedLoader(rows),
        eval_dataset=RaggedLoader(GLOBAL_BATCH, seed=1),
        **{**options, "callbacks": [*options.pop("callbacks", ()), *callbacks]},  # type: ignore[arg-type, misc]
    )


def curve(log_history: list[Mapping[str, object]] | list[dict[str, object]]) -> list[Point]:
    """One point for each logged optimizer step."""
    logged = [entry for entry in log_history if "loss" in entry]
    return [Point(float(entry["loss"]), float(entry["grad_norm"])) for entry in logged]  # type: ignore[arg-type]


def _by_reference(case: Case, directory: Path) -> list[Point]:
    return train(case.recipe, GLOBAL_BATCH // case.accumulation)


def _by_reference_with_another_adamw(case: Case, directory: Path) -> list[Point]:
    other = replace(case.recipe, fused=not case.recipe.fused)
    return train(other, GLOBAL_BATCH // case.accumulation)


def _here(case: Case, directory: Path) -> list[Point]:
    trainer = build(case, directory)
    trainer.train()
    return curve(trainer.state.log_history)


def _restarted(case: Case, directory: Path) -> list[Point]:
    first = build(case, directory, Stop(STOP_AT), save_strategy="steps")
    first.train()
    second = build(case, directory, save_strategy="steps")
    second.train()
    if second.state.session_start_step != STOP_AT:
        raise RuntimeError(f"the second start began at step {second.state.session_start_step}")
    return curve(second.state.log_history)


RUNNERS: dict[str, Runner] = {
    "reference": _by_reference,
    "reference with another AdamW": _by_reference_with_another_adamw,
    "here": _here,
    "restarted": _restarted,
}
"""Each trains a row in an empty directory. One for several processes starts `case.world_size` of them, and
returns what rank 0 logged."""


def run(case: Case, directory: Path) -> list[Point]:
    """Train a row."""
    torch._dynamo.reset()  # what other rows compiled would count as recompilations of this one
    counters.clear()
    points = RUNNERS[case.runner](case, directory)
    if bool(case.settings.get("torch_compile")) != bool(counters["frames"]["ok"]):
        raise RuntimeError(f"{case.name}: {counters['frames']['ok']} frames were compiled")
    return points
