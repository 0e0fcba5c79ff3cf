"""What happens between optimizer steps: log, evaluate, save."""

from __future__ import annotations

import time

from .evaluation import EvaluationData, evaluate
from .interval import record_of
from .peak_memory import take_peak_memory
from .run import Run
from .schedule import Periodic


class Actions:
    """Serves what is due and what callbacks ask for, in the order log, evaluate, save."""

    def __init__(self, run: Run) -> None:
        self.run = run
        args = run.args
        self._log = Periodic(args.logging_strategy, args.logging_steps, args.logging_first_step)
        self._evaluate = Periodic(args.eval_strategy, args.eval_steps)
        self._save = Periodic(args.save_strategy, args.save_steps)

    def after_step(self) -> None:
        """Serve what is due after the optimizer step just done."""
        step = self.run.state.global_step
        self._serve(log=self._log.due(step), evaluate=self._evaluate.due(step), save=self._save.due(step))

    def after_epoch(self) -> None:
        """Serve what is due at the end of an epoch."""
        self._serve(log=self._log.each_epoch, evaluate=self._evaluate.each_epoch, save=self._save.each_epoch)

    def after_run(self) -> None:
        """Log what is left and save, unless that was done at this step or somebody aborted.

        A run that is stopped early keeps its log interval open in the checkpoint, so that the points of
        the curve are the same as without the stop.
        """
        reached_end = not self.run.events.control.ends_run
        self._serve(log=reached_end, evaluate=False, save=self.run.args.save_strategy != "no")

    def log(self, record: dict[str, object]) -> None:
        """Put an entry into the history and show it to the callbacks."""
        state = self.run.state
        state.log_history.append({"global_step": state.global_step, **record})
        self.run.events.fire("on_log", logs=record)

    def log_interval(self) -> None:
        """End the log interval and log it; nothing if no step was done in it."""
        run = self.run
        totals = run.interval.close()
        if totals is None:
            return
        record = record_of(totals, run.state, run.learning_rate)
        memory = take_peak_memory(run.parallel)
        if memory is not None:
            record["peak_mem_allocated"] = memory
        run.events.fire("on_log_step", logs=record)
        self.log(record)

    def evaluate(self, data: EvaluationData) -> dict[str, float]:
        """Score evaluation data from its beginning, log the result, and return it."""
        run = self.run
        started = time.perf_counter()
        with run.meter.exclude("evaluate"):
            result = evaluate(
                run.parallel,
                data.fresh(),
                run.loss,
                run.args,
                on_batch=lambda: run.events.fire("on_prediction_step"),
            )
        seconds = time.perf_counter() - started
        metrics = {"eval_loss": result.loss, "eval_tokens": result.tokens, "eval_seconds": seconds}
        run.events.fire("on_evaluate", metrics=metrics)
        self.log({"epoch": run.state.epoch, **metrics})
        return metrics

    def save(self) -> None:
        """Save a checkpoint of this step."""
        run = self.run
        with run.meter.exclude("save"):
            path = run.manager.save_checkpoint(run.state.global_step)
        run.saved_step = run.state.global_step
        run.events.fire("on_save", checkpoint_path=str(path))

    def _serve(self, *, log: bool, evaluate: bool, save: bool) -> None:
        run, control = self.run, self.run.events.control
        if log or control.should_log:
            control.should_log = False
            self.log_interval()
        if run.evaluation is not None and (evaluate or control.should_evaluate):
            control.should_evaluate = False
            self.evaluate(run.evaluation)
        wanted = save or control.should_save
        control.should_save = False
        if wanted and run.saved_step != run.state.global_step and not control.should_abort_without_save:
            self.save()
