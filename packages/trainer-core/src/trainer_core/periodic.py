"""What happens between optimizer steps and when: log, evaluate, save, stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType

import torch

from dist_env import get_logger

from .arguments import MinimalTrainingArguments
from .checkpointing import load_best, note_best
from .data.loaders import Batch, EvaluationSets, prefix_of
from .errors import ConfigurationError, DataError
from .evaluation import evaluate
from .metrics.log_window import plain_record, record_of
from .metrics.memory import take_peak_memory
from .run import Run
from .state import StopCause, TrainerState
from .update import NonFiniteGradientError

logger = get_logger(__name__)


@dataclass(frozen=True)
class Periodic:
    """Due at multiples of a period, counted in absolute optimizer steps, so that a resume moves nothing."""

    strategy: str
    period: int
    first_step: bool = False
    delay: float = 0
    """Steps, or epochs with that strategy, before it is due for the first time."""

    def after_step(self, step: int) -> bool:
        """Whether it is due after this optimizer step."""
        if self.strategy != "steps" or step < self.delay:
            return False
        return step % self.period == 0 or (self.first_step and step == 1)

    def after_epoch(self, epochs: int) -> bool:
        """Whether it is due now that so many epochs are done."""
        return self.strategy == "epoch" and epochs >= self.delay


def _length(loader: Iterable[Batch]) -> int:
    if not isinstance(loader, Sized):
        raise TypeError(f"{type(loader).__name__} has no len()")
    return len(loader)


def batches_per_epoch(loader: Iterable[Batch]) -> int | None:
    """Length of a loader in batches, or None when it cannot tell."""
    try:
        return _length(loader)
    except (TypeError, NotImplementedError) as error:
        # Iterable loaders of torch say in this way that they have no length; so might a mistake in __len__.
        # What wraps a loader for several ranks has one whether or not the loader has.
        if hasattr(type(getattr(loader, "loader", loader)), "__len__"):
            logger.info("the length of the training loader (%s) is unknown: %s", type(loader).__name__, error)
        return None


def updates_per_epoch(loader: Iterable[Batch], accumulation: int) -> int | None:
    """Optimizer steps per epoch; a last window that is not full counts as one."""
    batches = batches_per_epoch(loader)
    return None if batches is None else math.ceil(batches / accumulation)


def total_steps(args: MinimalTrainingArguments, per_epoch: int | None) -> int:
    """Optimizer steps at which the run ends, as far as that is known beforehand.

    Args:
        args: `max_steps` and `epoch_limit`; the smaller limit wins.
        per_epoch: Optimizer steps per epoch, or None when the loader cannot tell.

    Returns:
        The number of steps, or -1 when only the end of the data will tell.

    Raises:
        ConfigurationError: For a fraction of an epoch of unknown length.
    """
    limits = [limit for limit in (steps_of_epochs(args, per_epoch), args.max_steps) if limit >= 0]
    return min(limits, default=-1)


def steps_of_epochs(args: MinimalTrainingArguments, per_epoch: int | None) -> int:
    """Optimizer steps of the epochs that limit the run; -1 where none do, or their length is not known.

    Raises:
        ConfigurationError: For a fraction of an epoch of unknown length.
    """
    epochs = args.epoch_limit
    if epochs is None:
        return -1
    if per_epoch is not None:
        return math.floor(per_epoch * epochs + 1e-9)
    if epochs != int(epochs):
        raise ConfigurationError(
            "num_train_epochs",
            args.num_train_epochs,
            "is a fraction of an epoch, but this data cannot tell how long an epoch is",
            "set epoch_train_steps to the optimizer steps of an epoch, or max_steps instead of "
            "num_train_epochs, or a whole number of epochs",
        )
    return -1


def set_length(state: TrainerState, args: MinimalTrainingArguments, loader: Iterable[Batch] | None) -> None:
    """Write into the state where the run ends and how long an epoch is, as far as known.

    Raises:
        ConfigurationError: If `epoch_train_steps` contradicts the data, or there is a fraction of an epoch of
            unknown length.
        DataError: If an epoch has no step.
    """
    if loader is None:
        return
    length = updates_per_epoch(loader, args.gradient_accumulation_steps)
    if length is not None and args.epoch_train_steps not in (None, length):
        raise ConfigurationError(
            "epoch_train_steps",
            args.epoch_train_steps,
            f"is for data without a length, but an epoch of this data has {length} optimizer steps",
            "leave it out",
        )
    state.epoch_train_steps = args.epoch_train_steps if length is None else length
    if state.epoch_train_steps == 0 and args.epoch_limit != 0 and args.max_steps:
        raise DataError("the training loader has the length 0. Give it data, or leave drop_last out.")
    state.max_steps = total_steps(args, state.epoch_train_steps)
    if state.epoch_train_steps and state.max_steps >= 0:
        state.num_train_epochs = state.max_steps / state.epoch_train_steps


def say_length(state: TrainerState, args: MinimalTrainingArguments) -> None:
    """Say which of two limits ends the run, and warn of a warm-up that the run does not get through."""
    if args.max_steps >= 0 and args.epoch_limit is not None:
        by_epochs = steps_of_epochs(args, state.epoch_train_steps)
        logger.info(
            "max_steps=%d and num_train_epochs=%g%s are both set: the run ends at the first of them%s",
            args.max_steps,
            args.epoch_limit,
            f" ({by_epochs} steps)" if by_epochs >= 0 else "",
            f", after {state.max_steps} steps" if by_epochs >= 0 else "",
        )
    if 0 < state.max_steps <= args.warmup_steps:
        logger.warning(
            "warmup_steps=%d is not shorter than the run of %d steps, which ends before the learning rate "
            "reaches learning_rate; lower warmup_steps",
            args.warmup_steps,
            state.max_steps,
        )


EXIT_RESUMABLE = 75
"""Exit code of a run that was asked to stop early and saved: start it again to continue (EX_TEMPFAIL)."""

_Handler = Callable[[int, FrameType | None], object] | int
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 1.0
"""A signal that comes again this soon is the same one: the terminal and a launcher both pass Ctrl-C on."""


class StopRequests:
    """Remembers the first signal, and watches the time limit; the loop asks at its own moments.

    A signal that has come before, a second or more ago, stops at once; one of another kind does not, for
    schedulers send several. A handler that somebody else had installed is called as well. Outside the main
    thread Python delivers no signals, and only time is watched.

    Args:
        max_seconds: Time from entering to the request to stop; None for no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._received_at: dict[int, float] = {}
        self._deadline: float | None = None
        self._max_seconds = max_seconds
        self._before: dict[int, _Handler | None] = {}

    def __enter__(self) -> StopRequests:
        if self._max_seconds is not None:
            self._deadline = time.monotonic() + self._max_seconds
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @property
    def cause(self) -> str | None:
        """What asked this process to stop: a signal's name or `max_train_seconds`; None if nothing did."""
        if self.received is not None:
            return self.received.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "max_train_seconds"
        return None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if (before_at := self._received_at.setdefault(number, now)) != now:
            if now - before_at < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        first, self.received = self.received is None, self.received or signal.Signals(number)
        if first:
            rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
            where = f" on rank {rank}" if rank else ""
            end = "finishing the step, then saving; once more to stop at once."
            text = f"\n{self.received.name}{where}: {end}\n"
            # Straight to the descriptor: a handler may interrupt another print, and the terminal may be gone.
            with suppress(OSError):
                os.write(2, text.encode())
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


class Actions:
    """Serves what is due and what callbacks ask for, in the order log, evaluate, save.

    Args:
        run: The run.
        stop_requested: Whether this process was asked to stop; an evaluation is left at once then.
    """

    def __init__(self, run: Run, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.run = run
        self._stop_requested = stop_requested
        args = run.args
        self._log = Periodic(args.logging_strategy, args.logging_steps, first_step=args.logging_first_step)
        self._evaluate = Periodic(args.eval_strategy, args.eval_steps, delay=args.eval_delay)
        self._save = Periodic(args.save_strategy, args.save_steps)

    def after_step(self) -> bool:
        """Serve what is due after the optimizer step just done; says whether anything was done."""
        step = self.run.state.global_step
        save = self._save.after_step(step)
        self.run.compile_cache.save()
        return self._serve(
            log=self._log.after_step(step),
            evaluate=self._evaluate.after_step(step) or (save and self.run.args.eval_on_save),
            save=save,
        )

    def after_epoch(self) -> None:
        """Serve what is due at the end of an epoch."""
        epoch = self.run.state.raw_epoch
        save = self._save.after_epoch(epoch)
        self._serve(
            log=self._log.after_epoch(epoch),
            evaluate=self._evaluate.after_epoch(epoch) or (save and self.run.args.eval_on_save),
            save=save,
        )

    def serve_requests(self) -> bool:
        """Serve what callbacks have asked for, and nothing else; says whether they have."""
        return self._serve(log=False, evaluate=False, save=False)

    def after_run(self) -> None:
        """Log what is left and save, unless that was done at this step or somebody aborted.

        A run that is stopped early keeps its log interval open in the checkpoint, so that the points of
        the curve are the same as without the stop.
        """
        run, args, state = self.run, self.run.args, self.run.state
        save = args.save_strategy != "no"
        reached_end = not run.events.control.ends_run
        at_end = reached_end or 0 <= state.max_steps <= state.global_step
        # The checkpoint of an early stop is none that the run would have made by itself.
        log = reached_end and args.logging_strategy != "no"
        evaluate = save and at_end and (args.eval_on_save or args.tracks_best)
        self._serve(log=log, evaluate=evaluate, save=save)
        run.log_window.flush()

    def run_pending_eval(self) -> None:
        """Do the evaluation that a stop cut short, so that the log is the same as without the stop."""
        run = self.run
        if not run.state.evaluation_pending or run.events.control.ends_run:
            return
        if self._evaluate_or_defer() and run.args.tracks_best:
            self.save()

    def restore_best(self) -> None:
        """Put the weights of the best checkpoint into the model, if the arguments ask for it.

        Not if it continues when it is started again, as it is not at its end then, nor if it was aborted.
        """
        cause = self.run.events.stop_cause
        if self.run.args.load_best_model_at_end and (cause is None or not (cause.resumable or cause.aborted)):
            load_best(self.run)

    def log(self, record: dict[str, object]) -> None:
        """Put an entry into the history and show it to the callbacks."""
        state = self.run.state
        # Both names: `step` is that of the Hugging Face Trainer.
        position = {"global_step": state.global_step, "step": state.global_step}
        state.log_history.append({**position, **plain_record(record)})
        if self.run.lease.may_log():
            self.run.events.fire("on_log", logs=record)

    def evaluate(self, sets: EvaluationSets) -> dict[str, float] | None:
        """Score evaluation data from its beginning, log the result, and return it; None if asked to stop."""
        run = self.run
        metrics: dict[str, float] = {}
        run.garbage.relieve_device()
        with run.meter.exclude("evaluate"):
            for name, data in sets.items():
                started = time.perf_counter()
                result = evaluate(run, data.fresh(), name, stop_requested=self._stop_requested)
                if result is None:
                    return None
                metrics |= result
                metrics[f"{prefix_of(name)}seconds"] = time.perf_counter() - started
        run.events.fire("on_evaluate", metrics=metrics)
        self.log({"epoch": run.state.epoch, **metrics})
        return metrics

    def save(self, path: str | Path | None = None) -> Path:
        """Save a checkpoint of this step, in a new directory of its own if a path is given.

        Raises:
            ConfigurationError: If the best weights have taken the place of those of this step.
        """
        run = self.run
        if run.holds_best:
            raise ConfigurationError(
                "model",
                "best",
                f"has the weights of {run.state.best_model_checkpoint}, with which the optimizer of step "
                f"{run.state.global_step} cannot continue",
                "call save_model() to write these weights, or load_checkpoint() first",
            )
        if path is not None:
            with self._saving():
                return run.manager.save_checkpoint(run.state.global_step, path=path)
        metrics = None
        if run.evaluated is not None and self._has_result():
            metrics, run.ranked_step = run.evaluated[1], run.state.global_step
        with self._saving():
            saved = run.manager.save_checkpoint(run.state.global_step, metrics=metrics)
            note_best(run)
        run.saved_step = run.state.global_step
        run.events.fire("on_save", checkpoint_path=str(saved))
        return saved

    def save_to_memory(self) -> None:
        """Save a checkpoint in memory, if one is due after the optimizer step just done."""
        run, every = self.run, self.run.args.memory_save_steps
        if not every or run.state.global_step % every or run.events.control.ends_run:
            return
        if not self._gradients_were_finite():
            return
        with self._saving():
            saved = run.manager.save_to_memory(run.state.global_step)
        if saved is None:
            return  # Memory has become short since the first one, on all ranks alike; a warning has said so.
        run.events.fire("on_memory_save", checkpoint_path=str(saved))

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Leave the time of a save out of that of training, and show it in traces of the profiler."""
        run = self.run
        with (
            run.meter.exclude("save"),
            torch.autograd.profiler.record_function("checkpoint"),
            run.built.synced_weights(optimizer=True),
        ):
            yield

    def _serve(self, *, log: bool, evaluate: bool, save: bool) -> bool:
        control = self.run.events.control
        asked = log or evaluate or save
        evaluate = evaluate or (control.should_save and self.run.args.eval_on_save)
        if not (asked or control.should_log or control.should_evaluate or control.should_save):
            return False
        if not self._gradients_were_finite():
            return True
        # A flag is read when its turn comes: a handler of one stage may ask for the next, or abort.
        if self._is_asked("should_log", log):
            self._write_log_entry()
        if self._is_asked("should_evaluate", evaluate):
            self._evaluate_or_defer()
        if self._is_asked("should_save", save) and self._may_save():
            self.save()
        return True

    def _is_asked(self, flag: str, due: bool) -> bool:
        control = self.run.events.control
        raised = self.run.ranks.any([due, getattr(control, flag)])
        setattr(control, flag, False)
        return any(raised)

    def _may_save(self) -> bool:
        run = self.run
        aborted = run.ranks.any([run.events.control.should_abort_without_save])[0]
        step = run.state.global_step
        unranked = run.args.tracks_best and self._has_result() and run.ranked_step != step
        return not aborted and (run.saved_step != step or unranked)

    def _write_log_entry(self, **further: object) -> None:
        """End the log interval and log it with further entries; nothing if no step was done in it."""
        run = self.run
        totals = run.log_window.close()
        if totals is None:
            return
        if not totals.updates:
            logger.warning("every one of the last %d optimizer steps was skipped", totals.skipped)
        elif totals.applied_tokens == 0:
            logger.warning(
                "no label counted in the last %d optimizer steps, whose loss is shown as 0: every label is "
                "-100, or rows are too short to predict a token from another. Look at the labels",
                totals.updates,
            )
        record = record_of(totals, run.state) | {"peak_flops": run.flops.peak()}
        if (recompiles := run.recompiles.count()) is not None:
            record["recompiles"] = recompiles
        memory = take_peak_memory(run.ranks)
        if memory is not None:
            record["peak_mem_allocated"] = memory
        record |= run.built.log_entries()
        record |= further
        run.events.fire("on_log_step", logs=record)
        self.log(record)

    def _evaluate_or_defer(self) -> bool:
        """Evaluate the run's own data; a stop that comes first leaves it for the next start."""
        run = self.run
        if run.evaluation is None or run.state.evaluated_step == run.state.global_step:
            return False
        cause = run.events.stop_cause
        # A run that a callback ends is not started again to make up for it.
        resumable = cause is not None and cause.resumable
        asked = run.ranks.any([self._stop_requested() or resumable])[0]
        metrics = None if asked else self.evaluate(run.evaluation)
        run.state.evaluation_pending = metrics is None
        if metrics is None:
            return False
        run.evaluated = (run.state.global_step, metrics)
        run.state.evaluated_step = run.state.global_step
        return True

    def _has_result(self) -> bool:
        return self.run.evaluated is not None and self.run.evaluated[0] == self.run.state.global_step

    def _gradients_were_finite(self) -> bool:
        """Look whether a step since the last look had a gradient that is not finite, as the policy wants."""
        run = self.run
        if run.update is None:
            return True
        report = run.update.check_nonfinite(run.state.global_step)
        if run.args.nonfinite_policy == "skip":
            return True
        # The gradient is the same on all ranks, but where each trains a model of its own.
        seen = run.ranks.gather([float(report.first_step if report.bad else math.inf)])
        first = min(step for (step,) in seen)
        if math.isinf(first):
            return True
        report = replace(report, bad=True, first_step=int(first))
        message = report.message(updated=run.args.fuse_optim_with_backward)
        if run.args.nonfinite_policy == "raise":
            raise NonFiniteGradientError(message)
        if not run.events.control.should_abort_without_save:
            left_out = 0 if run.args.fuse_optim_with_backward else run.state.global_step - int(first) + 1
            self._write_log_entry(nonfinite_step=report.first_step, skipped_steps=left_out)
            logger.error("%s The run stops without another checkpoint (nonfinite_policy='stop').", message)
            run.events.stop(
                StopCause("nonfinite_policy", f"gradient of step {report.first_step}", aborted=True)
            )
        return False
