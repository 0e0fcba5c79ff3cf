"""The callback that says, before training, what is about to run, and afterwards why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

import torch
from torch import nn

from ..errors import Dataclass
from .files import print_block

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..distributed.ranks import Ranks
    from ..state import StopCause, TrainerControl, TrainerState

SHOWN_ELSEWHERE = frozenset(
    {
        "output_dir",
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    }
)
"""Arguments that other rows of the block tell."""


class DescribedTrainer(Protocol):
    """What this callback uses of the trainer."""

    ranks: Ranks

    @property
    def stop_cause(self) -> StopCause | None:
        """Who ended the run early; None if it went to its end."""
        ...

    @property
    def matmul_dtype(self) -> str:
        """What matrix products run in."""
        ...

    def meta_model(self) -> nn.Module:
        """The model with all its parameters, perhaps without storage."""
        ...


class InfoCallback:
    """Prints one block on what is about to run, and one line on why it ended.

    Acts at on_train_begin and on_train_end, on rank 0: size of the model, examples per step, length of the
    run, device, precision, settings that are not at their defaults, version of torch, folder of the
    checkpoints, and the step at which the run continues.

    Args:
        stream: Where to print; standard error when not given.
    """

    name = "info"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        trainer: DescribedTrainer,
        **_: object,
    ) -> None:
        """Print the block."""
        if not state.is_world_process_zero:
            return
        rows = {
            "model": _model_text(trainer.meta_model()),
            "step": _step_size_text(args, state, trainer),
            "length": _length_text(state),
            "device": _device_text(trainer.ranks.device, state.num_processes),
            "precision": _precision_text(trainer.matmul_dtype, trainer.meta_model()),
            "settings": ", ".join(_changed_settings(args)) or "all at their defaults",
            "torch": torch.__version__,
            "checkpoints": "none" if args.save_strategy == "no" else args.output_dir,
            "begins": f"resumed at step {state.global_step}" if state.global_step else "at step 0",
        }
        width = max(map(len, rows))
        self._print("\n".join(f"{label:<{width}}  {text}" for label, text in rows.items()))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        trainer: DescribedTrainer,
        **_: object,
    ) -> None:
        """Print why the run ended."""
        if state.is_world_process_zero:
            self._print(f"ended at step {state.global_step}: {_end_text(state, trainer)}")

    def _print(self, text: str) -> None:
        print_block(text, self._stream, default="stderr")


def _model_text(model: nn.Module) -> str:
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return f"{type(model).__name__}, {total:,} parameters, {trainable:,} trainable, {_bytes_text(size)}"


def _bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _step_size_text(args: TrainingArguments, state: TrainerState, trainer: DescribedTrainer) -> str:
    ranks = trainer.ranks.data_parallel_size
    each, windows = args.per_device_train_batch_size, args.gradient_accumulation_steps
    factors = f"{each} per device x {windows} accumulated x {ranks} data-parallel"
    return f"{each * windows * ranks} examples = {factors}"


def _length_text(state: TrainerState) -> str:
    steps = f"{state.max_steps:,} steps" if state.max_steps >= 0 else "steps not known ahead"
    if state.num_train_epochs < 0:
        return steps
    per_epoch = f" of {state.epoch_train_steps:,} steps" if state.epoch_train_steps else ""
    return f"{steps}, {state.num_train_epochs:.4g} epochs{per_epoch}"


def _device_text(device: torch.device, ranks: int) -> str:
    name = str(device)
    if device.type == "cuda":
        name = f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{name}, {ranks} {'process' if ranks == 1 else 'processes'}"


def _precision_text(matmul_dtype: str, model: nn.Module) -> str:
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    return f"weights {', '.join(kinds)}; matrix products {matmul_dtype}"


def _changed_settings(args: Dataclass, prefix: str = "") -> Iterator[str]:
    for field in fields(args):
        value = getattr(args, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value == default or field.name in SHOWN_ELSEWHERE:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            yield from _changed_settings(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}={value}"


def _end_text(state: TrainerState, trainer: DescribedTrainer) -> str:
    cause = trainer.stop_cause
    if cause is None:
        done = 0 <= state.max_steps <= state.global_step
        return "all steps done" if done else f"{state.epoch:g} epochs done"
    manner = "aborted without a checkpoint" if cause.aborted else "stopped"
    return f"{manner} by {cause.name} in {cause.event}"
