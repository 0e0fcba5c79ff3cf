"""What a run under Lightning looks like to a callback: its arguments, its position, and its trainer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer


class Strategy(Protocol):
    """How Lightning's trainer spreads the work."""

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""

    def reduce(self, tensor: Tensor, *, reduce_op: str) -> Tensor:
        """Reduce over all ranks, by "sum" or "mean"."""


class LightningTrainer(Protocol):
    """Lightning's trainer, as far as it is used here."""

    callbacks: list[object]
    log_every_n_steps: int
    accumulate_grad_batches: int
    global_step: int
    current_epoch: int
    max_steps: int
    num_training_batches: int | float
    estimated_stepping_batches: int | float
    default_root_dir: str
    log_dir: str | None
    is_global_zero: bool
    local_rank: int
    logged_metrics: Mapping[str, Tensor]
    optimizers: list[Optimizer]
    strategy: Strategy


class LightningModule(Protocol):
    """The module in training; callbacks get it as `model`."""


@dataclass(frozen=True)
class RunArguments:
    """Arguments of a run under Lightning.

    Attributes:
        output_dir: Root directory of the run.
        logging_dir: Directory for log files.
        logging_steps: Optimizer steps between two records.
    """

    output_dir: str
    logging_dir: str
    logging_steps: int

    @classmethod
    def of(cls, trainer: LightningTrainer) -> RunArguments:
        """Read them from the trainer; every rank has to call this."""
        root = trainer.default_root_dir
        return cls(str(root), str(trainer.log_dir or root), trainer.log_every_n_steps)


@dataclass
class RunState:
    """Position of a run under Lightning.

    Attributes:
        global_step: Optimizer steps done since the very beginning.
        max_steps: Optimizer steps planned; 0 when unknown.
        epoch: Passes over the data so far; whole ones where the length of the data is unknown.
        is_world_process_zero: Whether this is rank 0 of the job.
        is_local_process_zero: Whether this is rank 0 of its node.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    @classmethod
    def of(cls, trainer: LightningTrainer) -> RunState:
        """Read the position at the start of training from the trainer."""
        planned = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        return cls(
            global_step=trainer.global_step,
            max_steps=int(planned) if math.isfinite(planned) else 0,
            epoch=float(trainer.current_epoch),
            is_world_process_zero=trainer.is_global_zero,
            is_local_process_zero=trainer.local_rank == 0,
        )

    def advance(self, trainer: LightningTrainer, batch_idx: int) -> None:
        """Take up the position after a batch."""
        self.global_step = trainer.global_step
        batches = trainer.num_training_batches
        part = (batch_idx + 1) / batches if math.isfinite(batches) and batches > 0 else 0.0
        self.epoch = trainer.current_epoch + part


@dataclass
class RunTotals:
    """Totals over the intervals of one `fit`, for the summary at its end.

    Attributes:
        first_step: Optimizer steps that had been done before.
        start: Time at the beginning.
        seconds: Net time of the intervals.
        counts: Sums of the counts in their records, by key.
    """

    first_step: int = 0
    start: float = 0.0
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, record: Mapping[str, object]) -> None:
        """Add the record of an interval."""
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self.seconds += numbers["interval_seconds"]
        for key in ("tokens", "input_tokens", "flos"):
            if key in numbers:
                self.counts[key] += numbers[key]

    def final_metrics(self, state: RunState, now: float) -> dict[str, object]:
        """Return the metrics of the whole run: the runtime and the speeds are net, as in the intervals.

        Tokens are the counted ones, as in `total_tokens`; where that is meant the name says `input`.
        """
        metrics: dict[str, object] = {
            "epoch": state.epoch,
            "train_runtime": round(self.seconds, 3),
            "train_runtime_gross": round(now - self.start, 3),
        }
        for name in ("tokens", "input_tokens"):
            if name in self.counts:
                metrics[f"total_{name}"] = int(self.counts[name])
        if self.seconds > 0:
            metrics["train_steps_per_second"] = round((state.global_step - self.first_step) / self.seconds, 3)
            for key, unit in (("tokens", "tokens"), ("input_tokens", "input_tokens"), ("flos", "flops")):
                if key in self.counts:
                    metrics[f"{unit}_per_second"] = round(self.counts[key] / self.seconds, 2)
        return metrics
