"""Runs the callbacks of this package in a Lightning `Trainer`, as one Lightning callback."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from ..throughput import Kind, StretchTimer
from ..utilization import check_flops_per_token, job_peak_flops
from .lightning_state import (
    IntervalSums,
    LightningModule,
    LightningTrainer,
    RunArguments,
    RunState,
    RunTotals,
    TokenCounter,
    TokenCounts,
    autocast_dtype,
    count_batch,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Framework: TypeAlias = Literal["lightning.pytorch", "pytorch_lightning"]
FRAMEWORKS: tuple[Framework, ...] = ("lightning.pytorch", "pytorch_lightning")

Made = TypeVar("Made")


def framework_in_use() -> Framework:
    """Return the framework that is imported, or else the first one that is installed.

    Raises:
        ValueError: Both are imported.
        ModuleNotFoundError: Neither is installed.
    """
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if len(imported) > 1:
        raise ValueError(
            "framework=None cannot tell which Lightning is meant, because both lightning.pytorch and "
            "pytorch_lightning are imported. Name the one whose Trainer this is for."
        )
    for name in imported or FRAMEWORKS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        "LightningCallbacks needs Lightning, which is not installed. Install it with `pip install lightning`."
    )


def base_of(framework: Framework, name: str) -> type:
    """Return a base class of a framework: "Callback", or "Checkpoint" of those that save and come last.

    Raises:
        ValueError: The framework is not known.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r} must be one of {', '.join(FRAMEWORKS)}, or None.")
    base: type = getattr(importlib.import_module(f"{framework}.callbacks"), name)
    return base


def as_callback(cls: type[Made], framework: Framework) -> type[Made]:
    """Return a subclass of `cls` that is a callback of the framework as well; `cls` itself if it is one."""
    base = base_of(framework, "Callback")
    if issubclass(cls, base):
        return cls

    def reduce(self: Made) -> tuple[object, ...]:
        # The class below cannot be imported by name, so it is made again.
        return _remake, (cls, framework), self.__dict__

    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, base), body)


def _remake(cls: type[Made], framework: Framework) -> Made:
    return object.__new__(as_callback(cls, framework))


_logger = logging.getLogger("perf_metrics")


class LightningCallbacks:
    """A `lightning.pytorch.Callback` that fires the events of this package at a list of callbacks.

    Lightning is imported when an instance is made, and the instance is one of its `Callback`. At every
    `trainer.log_every_n_steps` optimizer steps, and at the end, it makes a record, and fires `on_log_step`
    and then `on_log` with it. At the very end `on_log` gets the final metrics. Events besides:
    `on_train_begin`, `on_epoch_begin`, `on_step_begin`, `on_step_end`, `on_evaluate`, `on_save`,
    `on_epoch_end`, `on_train_end`, `on_exception`; a callback has handlers for those it wants.

    | in the record | from |
    |---|---|
    | `loss` | mean of what `training_step` returned, over the batches of the interval and over ranks |
    | what the module logs | `trainer.logged_metrics` |
    | `learning_rate` | first parameter group of the first optimizer, as the last step used it |
    | `input_tokens`, `compute_tokens`, `tokens` | the batches, summed over ranks |
    | `flos` | `flops_per_token` x `compute_tokens` |
    | `peak_flops` | beside `flos`: the peaks of all devices, for the precision of the trainer |
    | `interval_seconds` | the clock, less validation, checkpoints that callbacks save, and compilation |
    | `data_wait_share` | from the end of a batch to the start of the next one, on this rank |

    The results of a validation go to `on_evaluate`, and then to `on_log`, with `val_` at the beginning of
    their names made `eval_`. Files go to `trainer.log_dir`; Lightning's own loggers get nothing from here.
    Ranks that hold parts of one model count their common batch once each.

    Args:
        callbacks: The callbacks, in the order in which they act: `DefaultMetrics` before displays.
        flops_per_token: Model FLOPs of a training step per position, such as
            `model_flops_per_token(model, sequence_length)`. None: no `flos`.
        count_tokens: Counts a batch. None: a mapping with `input_ids`, an integer tensor, or a tuple or list
            that begins with one of them.
        clock: Returns seconds from any fixed origin and never goes back.
        framework: Whose trainer it is for. None: the one that is imported already.

    Raises:
        ValueError: `flops_per_token` is not a positive number, `framework` is not one of the two, or both are
            imported and `framework` is None.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __new__(cls, *_: object, framework: Framework | None = None, **__: object) -> LightningCallbacks:
        """Make an instance that is a callback of the framework as well."""
        return super().__new__(as_callback(cls, framework or framework_in_use()))

    def __init__(
        self,
        callbacks: Sequence[object],
        *,
        flops_per_token: float | None = None,
        count_tokens: TokenCounter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        framework: Framework | None = None,
    ) -> None:
        super().__init__()
        check_flops_per_token(flops_per_token)
        self.callbacks = list(callbacks)
        self._flops_per_token = flops_per_token
        self._count_tokens = count_tokens
        self._timer = StretchTimer(clock)
        self._clock = clock
        self._framework: Framework = framework or framework_in_use()
        self._marker: object = None
        self._peak: float | None = None
        self._running = False
        self._begin_run()

    def _begin_run(self) -> None:
        self._sums = IntervalSums()
        self._state = RunState()
        self._args = RunArguments("", "", 0)
        self._totals = RunTotals()
        self._logged_step = 0
        self._learning_rate: float | None = None
        self._saved = False
        self._uncounted_batch_named = False
        self._shown: Mapping[str, Tensor] = {}
        self._before_evaluation: Mapping[str, Tensor] = {}
        self._evaluation_start = 0.0

    # Beginning and end.

    def on_fit_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Get told when the other callbacks have had their turn, and when those that save, the last, have."""
        hooks = {
            "on_train_batch_end": self._after_others("train"),
            "on_validation_end": self._after_others("evaluate"),
            "on_train_epoch_end": self._after_others("train"),
        }
        self._marker = type("AfterOthers", (base_of(self._framework, "Callback"),), hooks)()
        saving = base_of(self._framework, "Checkpoint")
        others = [callback for callback in trainer.callbacks if not isinstance(callback, saving)]
        savers = [callback for callback in trainer.callbacks if isinstance(callback, saving)]
        trainer.callbacks = [*others, self._marker, *savers, self._marker]

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Begin the first interval."""
        self._begin_run()
        self._args = RunArguments.of(trainer)
        self._state = RunState.of(trainer)
        self._logged_step = trainer.global_step
        self._totals = RunTotals(trainer.global_step, self._clock())
        if self._flops_per_token is not None:
            self._peak = job_peak_flops(pl_module, autocast_dtype(trainer))
        self._fire("on_train_begin", trainer, pl_module)
        self._running = True
        self._timer.start()

    def on_train_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Log the rest, and the final metrics."""
        if self._state.global_step > self._logged_step:
            self._log_interval(trainer, pl_module)
        self._end_run()
        final = self._totals.final_metrics(self._state, self._clock())
        self._fire("on_log", trainer, pl_module, logs=final)
        self._fire("on_train_end", trainer, pl_module)

    def on_exception(
        self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop timing, fire `on_exception`, and leave the trainer's list as it was."""
        try:
            if self._running:
                self._fire("on_exception", trainer, pl_module, exception=exception)
        finally:
            self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the trainer's list as it was."""
        self._end_run()
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self._marker]
        self._marker = None

    def _end_run(self) -> None:
        self._running = False
        self._timer.stop()

    # Epochs and batches.

    def on_train_epoch_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Fire `on_epoch_begin`."""
        self._fire("on_epoch_begin", trainer, pl_module)

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """The batch is there."""
        self._timer.end("data")
        if batch_idx % max(1, trainer.accumulate_grad_batches) == 0:
            self._fire("on_step_begin", trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: LightningTrainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the learning rate before a scheduler changes it."""
        if optimizer is trainer.optimizers[0]:
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(
        self,
        trainer: LightningTrainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Count the batch, and log where an interval ends."""
        self._sums.add(self._count(batch), _loss_of(outputs, trainer.accumulate_grad_batches))
        before = self._state.global_step
        self._state.advance(trainer, batch_idx)
        if self._state.global_step > before:
            self._fire("on_step_end", trainer, pl_module)
        every = trainer.log_every_n_steps
        if every and self._state.global_step // every > self._logged_step // every:
            self._log_interval(trainer, pl_module)
        else:
            self._timer.end("train")

    def on_train_epoch_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Fire `on_epoch_end`."""
        self._timer.end("train")
        self._fire("on_epoch_end", trainer, pl_module)

    # What is not training.

    def on_validation_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """The loader of the validation has been started, which is part of it."""
        self._before_evaluation = dict(trainer.logged_metrics)
        self._evaluation_start = self._clock()
        self._timer.end("evaluate")

    def on_validation_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Fire `on_evaluate` and `on_log` with what a validation in training has logged."""
        if self._running:
            results = _changed(trainer.logged_metrics, self._before_evaluation)
            self._shown = {**self._shown, **results}
            metrics = {_evaluation_key(key): float(value) for key, value in results.items()}
            metrics["eval_seconds"] = self._clock() - self._evaluation_start
            self._fire("on_evaluate", trainer, pl_module, metrics=metrics)
            self._fire("on_log", trainer, pl_module, logs={"epoch": self._state.epoch, **metrics})
        self._timer.end("evaluate")

    def on_save_checkpoint(
        self, trainer: LightningTrainer, pl_module: LightningModule, checkpoint: Mapping[str, object]
    ) -> None:
        """A checkpoint is being saved, and it is not over."""
        self._saved = True

    def _after_others(self, kind: Kind) -> Callable[..., None]:
        """A hook that judges the time that other callbacks have taken at an event."""

        def hook(_: object, trainer: LightningTrainer, pl_module: LightningModule, *__: object) -> None:
            saved, self._saved = self._saved, False
            self._timer.end("save" if saved else kind)
            if saved and self._running:
                self._fire("on_save", trainer, pl_module)

        return hook

    # Records.

    def _log_interval(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        figures = _changed(trainer.logged_metrics, self._shown)
        self._shown = dict(trainer.logged_metrics)
        finished, self._sums = self._sums, IntervalSums()
        sums = finished.over_ranks(trainer.strategy)
        record: dict[str, object] = {"epoch": self._state.epoch}
        record |= {key: float(value) for key, value in figures.items()}
        record |= sums
        # The figures are on the host by now, so the device has done all that they wait for.
        self._timer.end("train")
        interval = self._timer.take()
        if self._learning_rate is not None:
            record["learning_rate"] = self._learning_rate
        if self._flops_per_token is not None and "compute_tokens" in sums:
            record["flos"] = self._flops_per_token * sums["compute_tokens"]
            record["peak_flops"] = self._peak
        record["interval_seconds"] = interval.net_seconds
        record["data_wait_share"] = interval.data_wait_share
        self._logged_step = self._state.global_step
        self._totals.add(record)
        self._fire("on_log_step", trainer, pl_module, logs=record)
        self._fire("on_log", trainer, pl_module, logs=record)

    def _count(self, batch: object) -> TokenCounts | None:
        counts = count_batch(batch) if self._count_tokens is None else self._count_tokens(batch)
        if counts is None and not self._uncounted_batch_named:
            self._uncounted_batch_named = True
            _logger.warning(
                "the log will have no tokens: a batch of type %s is not a mapping with input_ids and no "
                "integer tensor; give LightningCallbacks(count_tokens=...) a function that returns "
                "TokenCounts",
                type(batch).__name__,
            )
        return counts

    def _fire(
        self, event: str, trainer: LightningTrainer, pl_module: LightningModule, **extra: object
    ) -> None:
        optimizers = trainer.optimizers
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            if callable(handler):
                handler(
                    self._args,
                    self._state,
                    None,
                    model=pl_module,
                    optimizer=optimizers[0] if optimizers else None,
                    trainer=trainer,
                    **extra,
                )


def _changed(metrics: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics that have been set anew; Lightning keeps showing old ones."""
    return {key: value for key, value in metrics.items() if before.get(key) is not value}


def _evaluation_key(key: str) -> str:
    return key if key.startswith("eval_") else f"eval_{key.removeprefix('val_').removeprefix('val/')}"


def _loss_of(outputs: object, accumulated: int) -> Tensor | None:
    """The loss that `training_step` returned, which Lightning has divided for the accumulation."""
    import torch

    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss * accumulated if isinstance(loss, torch.Tensor) else None
