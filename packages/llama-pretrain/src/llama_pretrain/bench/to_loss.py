"""`bench --to-loss`: seconds from the start of a process until its model has a given held-out loss."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataloader_dispatch import is_ignored
from dist_env import StaticDistributedEnvironment
from trainer_core import ConfigurationError

from ..arguments import PretrainArguments
from ..commands.arguments import MOST_STEPS, BenchArguments
from ..console import table
from ..data import evaluation_loader, split_data, standard_library, training_loader
from ..model.config import LlamaConfig, preset_or_load
from ..model.llama import Llama
from ..tokenizer import ByteTokenizer
from .baselines import BASELINES, REFERENCE, Work, mean_loss
from .summary import Spread
from .trial import choose_device, device_name

EVALUATE_EVERY = 50
"""Steps between evaluations."""
_EVALUATION_ROWS = 256
"""Of all held-out rows without padding, at even distances: the first ones are beginnings of documents, which
are harder."""
_EVALUATION_BATCH = 16
_ENVIRONMENT = StaticDistributedEnvironment()


class LossReached(Exception):
    """Ends the training of any contender, from within its optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """What one trial has shown.

    Attributes:
        seconds: From the start of the process until the held-out loss was reached; with imports, the reading
            of the data and the evaluations.
        start_seconds: Of these, those before the first optimizer step was done.
        steps: Optimizer steps.
        evaluations: Seconds since the start of the process, steps and held-out loss of each evaluation.
        device: Name of the device.
        threads: Threads of torch on the CPU.
        versions: Of the libraries of the contender.
    """

    seconds: float
    start_seconds: float
    steps: int
    evaluations: list[tuple[float, int, float]]
    device: str
    threads: int
    versions: dict[str, str]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TimeToLoss:
        """Read what `asdict` has made of one."""
        evaluations = [(seconds, steps, loss) for seconds, steps, loss in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations})


class LossClock:
    """Evaluates every few steps of any optimizer in this process, and ends training at the wanted loss.

    Args:
        wanted: The held-out loss, nats per byte.
        model: The model whose weights are trained, as its class computes it: in float32, by the same code
            whichever library trains it.
        rows: Held-out rows `[rows, positions]`, int64, on the device.
        began: `time.time()` at the start of the process.
    """

    def __init__(self, wanted: float, model: Llama, rows: Tensor, began: float) -> None:
        self.steps = 0
        self.first_step_seconds = 0.0
        self.evaluations: list[tuple[float, int, float]] = []
        self._wanted, self._model, self._rows, self._began = wanted, model, rows, began

    def __enter__(self) -> LossClock:
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first_step_seconds = time.time() - self._began
        if self.steps % EVALUATE_EVERY:
            return
        loss = self._loss()
        self.evaluations.append((time.time() - self._began, self.steps, loss))
        print(f"step {self.steps}: held-out loss {loss:.4f}", flush=True)
        if loss <= self._wanted:
            raise LossReached

    @torch.no_grad()
    def _loss(self) -> float:
        losses = [
            # By its class: Accelerate leaves a `forward` of its own, under autocast, in the object.
            mean_loss(Llama.forward(self._model, rows), rows) * len(rows)
            for rows in self._rows.split(_EVALUATION_BATCH)
        ]
        return float(torch.stack(losses).sum() / len(self._rows))


def run_to_loss(name: str, args: BenchArguments, folder: Path, began: float) -> TimeToLoss:
    """Train with one contender until the held-out loss is reached.

    Args:
        name: The contender; its libraries are installed.
        args: The settings, with `to_loss`.
        folder: For what it writes.
        began: `time.time()` at the start of the process.

    Raises:
        RuntimeError: If the loss was not reached, or not by training.
    """
    contender = BASELINES[name]
    train = contender.load()
    device = choose_device(args.use_cpu)
    config = preset_or_load(args.model, args.sequence_length)
    rows, held_out = _data(args, config)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    work = Work(config=config, examples=examples, args=args, device=device, directory=folder)
    model = work.model()
    assert args.to_loss is not None
    clock = LossClock(args.to_loss, model, held_out.to(device), began)
    reached = False
    with clock:
        try:
            train(work, model)
        except LossReached:
            reached = True
    if not reached:
        nearest = min((loss for _, _, loss in clock.evaluations), default=float("nan"))
        raise RuntimeError(
            f"did not reach {args.to_loss} in {clock.steps} steps; the nearest was {nearest:.4f}."
        )
    return TimeToLoss(
        seconds=clock.evaluations[-1][0],
        start_seconds=clock.first_step_seconds,
        steps=clock.steps,
        evaluations=clock.evaluations,
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions={each: version(each) for each in ("torch", *contender.distributions)},
    )


def check_vocabulary(config: LlamaConfig) -> None:
    """Refuse a model that has no embeddings for all bytes.

    Raises:
        ConfigurationError: If it has too few.
    """
    needed = ByteTokenizer().vocab_size
    if config.vocab_size < needed:
        raise ConfigurationError(
            "model",
            f"one of vocab_size={config.vocab_size}",
            f"must have at least {needed} ids, because to_loss trains on bytes",
            "choose a preset, such as tiny",
        )


def _data(args: BenchArguments, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Rows to train on, in order, and held-out ones: what the default run learns from."""
    settings = PretrainArguments(
        sequence_length=args.sequence_length,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=_EVALUATION_BATCH,
        max_eval_samples=None,
    )
    train, held_out = split_data(standard_library(), settings)
    assert held_out is not None
    tokenizer = ByteTokenizer()
    batches = training_loader(train, tokenizer, settings, _ENVIRONMENT)
    evaluation = list(evaluation_loader(held_out, tokenizer, settings, _ENVIRONMENT))
    is_full = ~is_ignored(_column(evaluation, "labels")[:, 1:]).any(1)
    full = _column(evaluation, "input_ids")[is_full]
    if not len(full):
        raise ConfigurationError(
            "sequence_length",
            args.sequence_length,
            "must be at most the length of a held-out file of the standard library, to evaluate a full row",
            "lower it, such as to 128",
        )
    count = min(_EVALUATION_ROWS, len(full))
    spread = torch.arange(count) * (len(full) - 1) // max(count - 1, 1)
    return _column(islice(batches, MOST_STEPS), "input_ids"), full[spread]


def _column(batches: Iterable[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


def to_loss_table(trials: Mapping[str, Sequence[TimeToLoss]], failures: Mapping[str, str]) -> str:
    """Return a row for each contender, and below the reason of each that failed."""
    beside = trials.get(REFERENCE)
    heading = ("to the loss", "seconds (low to high)", "until the first step", "steps", "time over torch's")
    rows = [heading]
    for name, theirs in trials.items():
        seconds = Spread.of([trial.seconds for trial in theirs])
        over = None
        if beside is not None:
            pairs = zip(theirs, beside, strict=True)
            over = Spread.of([trial.seconds / plain.seconds for trial, plain in pairs])
        rows.append(
            (
                BASELINES[name].label,
                f"{seconds.median:.1f} ({seconds.low:.1f} to {seconds.high:.1f})",
                f"{Spread.of([trial.start_seconds for trial in theirs]).median:.1f}",
                "/".join(str(steps) for steps in dict.fromkeys(trial.steps for trial in theirs)),
                "n/a" if over is None else f"{over.median:.3f} ({over.low:.3f} to {over.high:.3f})",
            )
        )
    reasons = [f"{BASELINES[name].label} failed: {reason}" for name, reason in failures.items()]
    return "\n".join([*table(rows, right=range(1, len(heading)), line=True), *reasons])


def largest_deviation(trials: Mapping[str, Sequence[TimeToLoss]]) -> float:
    """Return how far apart held-out losses after the same number of steps are, over all trials."""
    losses: dict[int, list[float]] = {}
    for trial in (trial for theirs in trials.values() for trial in theirs):
        for _, steps, loss in trial.evaluations:
            losses.setdefault(steps, []).append(loss)
    return max((max(same) - min(same) for same in losses.values()), default=0.0)
