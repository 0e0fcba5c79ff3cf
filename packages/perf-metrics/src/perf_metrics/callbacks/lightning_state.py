"""What a Lightning run looks like to a callback: arguments, position, trainer and token counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

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
    precision: str


def autocast_dtype(trainer: LightningTrainer) -> str | None:
    """The type that the trainer's precision casts to, as in "bf16-mixed"; None leaves it to the module."""
    precision = str(trainer.precision)
    types = {"bf16": "bf16", "16": "fp16", "transformer-engine": "fp8"}
    return next((dtype for name, dtype in types.items() if precision.startswith(name)), None)


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


class TokenCounts(NamedTuple):
    """Tokens of one batch on one rank, as integers or as tensors of one element on any device.

    Attributes:
        input_tokens: Input positions without padding.
        compute_tokens: All positions, padding included.
        tokens: Positions that the loss counts; None where this is not known.
    """

    input_tokens: int | Tensor
    compute_tokens: int | Tensor
    tokens: int | Tensor | None = None


TokenCounter: TypeAlias = Callable[[object], TokenCounts]


def count_batch(batch: object) -> TokenCounts | None:
    """Count the tokens of a batch of the usual layouts, without waiting for the device.

    Args:
        batch: A mapping with `input_ids`, an integer tensor [..., S], and perhaps an `attention_mask` and
            `labels` of the same shape; or an integer tensor of token ids; or a tuple or list that begins with
            one of these. Labels are not shifted yet, and -100 marks what the loss leaves out.

    Returns:
        The counts, or None for a batch that is none of these.
    """
    import torch

    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        return count_batch(batch[0])
    if isinstance(batch, torch.Tensor):
        return _count_ids(batch)
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
        return None
    ids: Tensor = batch["input_ids"]
    counts = _count_ids(ids)
    if counts is None:
        return None
    mask, labels = (_of_shape(batch.get(name), ids) for name in ("attention_mask", "labels"))
    return TokenCounts(
        input_tokens=counts.input_tokens if mask is None else (mask != 0).sum(),
        compute_tokens=counts.compute_tokens,
        tokens=None if labels is None else (labels[..., 1:] != -100).sum(),
    )


def _count_ids(ids: Tensor) -> TokenCounts | None:
    if ids.is_floating_point() or ids.is_complex():
        return None
    return TokenCounts(ids.numel(), ids.numel())


def _of_shape(value: object, ids: Tensor) -> Tensor | None:
    import torch

    return value if isinstance(value, torch.Tensor) and value.shape == ids.shape else None


class IntervalSums:
    """Sums the counts and the losses of the batches of a log interval, on the device."""

    def __init__(self) -> None:
        self._counts: dict[str, int | Tensor] = {}
        self._loss: float | Tensor = 0.0
        self._losses = 0

    def add(self, counts: TokenCounts | None, loss: Tensor | None) -> None:
        """Add a batch."""
        if counts is not None:
            for name, value in counts._asdict().items():
                if value is not None:
                    self._counts[name] = self._counts.get(name, 0) + value
        if loss is not None:
            self._loss = self._loss + loss.detach().float()
            self._losses += 1

    def over_ranks(self, strategy: Strategy) -> dict[str, int | float]:
        """Return `loss`, the mean over batches and ranks, and the token counts summed over ranks.

        A collective call that waits for the device.
        """
        import torch

        record: dict[str, int | float] = {}
        device = strategy.root_device
        if self._losses:
            mean = torch.as_tensor(self._loss, device=device) / self._losses
            record["loss"] = float(strategy.reduce(mean, reduce_op="mean"))
        if self._counts:
            sums = torch.tensor([int(value) for value in self._counts.values()], device=device)
            totals = strategy.reduce(sums, reduce_op="sum").tolist()
            record |= {name: int(total) for name, total in zip(self._counts, totals, strict=True)}
        return record
