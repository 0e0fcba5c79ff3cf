"""What happens between optimizer steps: log, evaluate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from dist_env import get_logger

from .checkpointing import load_best, note_best
from .evaluation import EvaluationSets, evaluate, prefix_of
from .interval import plain_record, record_of
from .optimization import NonFiniteGradientError
from .peak_memory import take_peak_memory
from .run import Run
from .schedule import Periodic
from .state import StopCause

logger = get_logger(__name__)


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
        run.interval.flush()

    def make_up(self) -> None:
        """Do the evaluation that a stop cut short, so that the log is the same as without the stop."""
        run = self.run
        if not run.state.evaluation_pending or run.events.control.ends_run:
            return
        if self._evaluate_or_defer() and run.args.tracks_best:
            self.save()

    def restore_best(self) -> None:
        """Put the weights of the best checkpoint into the model, if the arguments ask for it.

        Not if it goes on when it is started again, as it is not at its end then, nor if it was aborted.
        """
        cause = self.run.events.stop_cause
        if self.run.args.load_best_model_at_end and (cause is None or not (cause.resumable or cause.aborted)):
            load_best(self.run)

    def log(self, record: dict[str, object]) -> None:
        """Put an entry into the history and show it to the callbacks."""
        state = self.run.state
        state.log_history.append({"global_step": state.global_step, **plain_record(record)})
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

    def save(self) -> None:
        """Save a checkpoint of this step."""
        run = self.run
        metrics = None
        if run.evaluated is not None and self._has_result():
            metrics, run.ranked_step = run.evaluated[1], run.state.global_step
        with run.meter.exclude("save"), run.built.synced_weights(optimizer=True):
            path = run.manager.save_checkpoint(run.state.global_step, metrics=metrics)
            note_best(run)
        run.saved_step = run.state.global_step
        run.events.fire("on_save", checkpoint_path=str(path))

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
            self._log_interval()
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

    def _log_interval(self, **further: object) -> None:
        """End the log interval and log it with further entries; nothing if no step was done in it."""
        run = self.run
        totals = run.interval.close()
        if totals is None:
            return
        if not totals.updates:
            logger.warning("every one of the last %d optimizer steps was skipped", totals.skipped)
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
        report = run.update.look(run.state.global_step)
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
            self._log_interval(nonfinite_step=report.first_step, skipped_steps=left_out)
            logger.error("%s; the run stops without another checkpoint (nonfinite_policy='stop')", message)
            run.events.stop(
                StopCause("nonfinite_policy", f"gradient of step {report.first_step}", aborted=True)
            )
        return False
