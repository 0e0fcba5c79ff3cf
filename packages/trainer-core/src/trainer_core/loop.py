"""The training loop: epochs of optimizer steps, each over a window of microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.autograd.profiler import record_function

from checkpoint_core import RNGState
from dataloader_dispatch import begin_pass, end_workers, load_loader_state, loader_state, set_loader_epoch
from dist_env import gather_objects, get_logger

from .callbacks import InfoCallback, ProfilerCallback
from .data.loaders import Batch, Window, epoch_of, is_torchdata, keeps_position, leave_epoch, next_window
from .errors import DataError
from .loss import loss_denominator
from .periodic import Actions, StopRequests
from .run import Run
from .state import StopCause, TrainOutput

logger = get_logger(__name__)


class TrainingLoop:
    """Runs from the state's step to the end of the run.

    Args:
        run: A prepared run with training data.
        actions: What is done between steps.
        stops: Tells of signals and the time limit.
    """

    def __init__(self, run: Run, actions: Actions, stops: StopRequests) -> None:
        if run.optimizer is None or run.update is None:
            raise ValueError("this run has no optimizer, because it was prepared without training data.")
        self.run = run
        self.optimizer = run.optimizer
        self.update = run.update
        self.actions = actions
        self.stops = stops
        self._saw_empty_epoch = False
        self._told_abort: bool | None = None
        self._continues = run.has_trained
        self._pass: Iterator[Batch] | None = None
        run.has_trained = True

    def train(self) -> TrainOutput:
        """Train, save and sum up. No worker process of a loader is left behind."""
        try:
            return self._train()
        except BaseException as error:  # Ctrl-C as well: a callback may have something to close
            self._tell_exception(error)
            raise
        finally:
            end_workers(self.run.loader, self._pass)
            for data in (self.run.evaluation or {}).values():
                end_workers(data.last)

    def _tell_exception(self, error: BaseException) -> None:
        """Tell callbacks what ended training; that decides the exit code, and not what one of them raises."""
        try:
            self.run.events.fire("on_exception", exception=error)
        except Exception:
            logger.exception("a callback failed in on_exception")

    def _train(self) -> TrainOutput:
        run = self.run
        run.built.zero_grad()
        self.update.reset()
        run.log_window.begin()
        run.built.begin(run.state.global_step)
        run.meter.start()
        run.speed.begin(run.state)
        run.state.session_start_step = run.state.global_step
        run.events.fire("on_train_begin")
        self._sync_control()
        self.actions.run_pending_eval()
        self._sync_control()
        if self._epoch_is_complete():
            self._close_epoch()  # the checkpoint is of the last step of an epoch
        self._say_if_nothing_is_left()
        while not self._run_is_over():
            self._train_epoch()
        self.actions.after_run()
        self._sync_control()
        metrics = run.progress.final_metrics()
        history = run.state.log_history
        if history and "train_runtime" in history[-1] and history[-1]["global_step"] == run.state.global_step:
            history.pop()  # of the call before, which has ended at the same step
        self.actions.log({**metrics, "peak_flops": run.flops.peak()})
        run.built.end()
        self.actions.restore_best()
        if run.args.tracks_best:
            logger.info("%s", run.manager.best_summary())
        run.events.fire("on_train_end")
        return TrainOutput(run.state.global_step, metrics)

    def _train_epoch(self) -> None:
        run = self.run
        self._announce_epoch()
        batches = self._batches()
        control = run.events.control
        control.should_epoch_stop = False
        run.events.fire("on_epoch_begin")
        self._sync_control()
        ended = control.should_epoch_stop
        while not (ended or self._run_is_over()):
            # Spans in traces of the profiler, by which `perf-metrics trace` tells what a step waits for.
            with run.meter.measure("data"), record_function("data wait"):
                window = next_window(batches, run.args.gradient_accumulation_steps, run.loss, run.loader)
            if window is not None:
                is_short = len(window.batches) < run.args.gradient_accumulation_steps
                run.state.epoch_data_ended = is_short or self._loader_moved_on()
                with run.ranks.equal_draws(run.loader):
                    self._train_step(window)
                self._sync_control()
                if self.actions.after_step():
                    self._sync_control()
                    self._serve_requests()
                self.actions.save_to_memory()
            ended = window is None or control.should_epoch_stop
        if ended or (self._epoch_is_complete() and not control.ends_run):
            self._close_epoch()
        run.events.fire("on_epoch_end")
        self._sync_control()
        self._serve_requests()

    def _serve_requests(self) -> None:
        """Serve what handlers have asked for since the last turn, while it still is about this step.

        It comes to an end: a step is logged, evaluated and saved once, and only that calls handlers again.
        """
        while self.actions.serve_requests():
            self._sync_control()

    def _batches(self) -> Iterator[Batch]:
        """The rest of the epoch.

        In mid-epoch the random generators stay where the checkpoint has them. At the beginning the loader
        draws from them, and a checkpoint that is saved before the first step has them as they were before.
        """
        run, generators = self.run, RNGState()
        self._hold_position()
        if run.progress.generators_before_epoch is not None:
            # A pass before this one ended without a step: it was stopped, or its data had ended already.
            generators.load_state_dict(run.progress.generators_before_epoch)
        before = generators.state_dict()
        if run.loader is None:
            raise DataError("train() needs a train_dataset. Give one to the Trainer.")
        batches = self._pass = begin_pass(run.loader)
        if run.steps_in_epoch:
            generators.load_state_dict(before)
            return batches
        run.progress.generators_before_epoch = before
        if is_torchdata(run.loader) and run.loader.generator is None:
            # Each of its iterators draws a seed, and it makes none or two where others make one: its state
            # was asked for, or it was loaded behind the last batch of an epoch.
            generators.load_state_dict(before)
            torch.empty((), dtype=torch.int64).random_()
        return batches

    def _hold_position(self) -> None:
        """Let a loader that this process has left in mid-epoch continue there: a new iterator begins anew."""
        loader = self.run.loader
        if self.run.steps_in_epoch and self._continues and keeps_position(loader):
            load_loader_state(loader, loader_state(loader))
        self._continues = False

    def _train_step(self, window: Window) -> None:
        run, events = self.run, self.run.events
        events.fire("on_step_begin")
        run.built.check_frozen()
        self._note_unserved_profile()
        run.progress.generators_before_epoch = None
        tokens = run.ranks.sum(window.target_tokens)
        loss_sum = run.built.forward_backward(
            window.batches, run.loss, denominator=self.update.denominator(tokens), fire=events.fire
        )
        grad_norm = self.update.grad_norm()
        events.fire("on_pre_optimizer_step")
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._step_optimizer()
        if events.listens("on_train_metrics"):
            loss = loss_sum / loss_denominator(window.target_tokens)
            events.fire("on_train_metrics", loss=loss, grad_norm=grad_norm, tokens=window.target_tokens)
        run.log_window.add(window, loss_sum, grad_norm, learning_rate)
        run.state.global_step += 1
        run.built.after_step(run.state.global_step)
        run.update_epoch()
        self._note_a_long_epoch()
        events.fire("on_step_end")
        if run.speed.starts_after(run.state):
            run.log_window.flush()
            run.speed.mark(run.state)

    def _note_unserved_profile(self) -> None:
        """Say so where a profile is asked for, and there is no callback to record one.

        A ProfilerCallback that is there was asked after its turn; the flag stays for the next step.
        """
        control, callbacks = self.run.events.control, self.run.events.callbacks
        if control.should_profile and not any(isinstance(one, ProfilerCallback) for one in callbacks):
            control.should_profile = False
            logger.warning(
                "a profile of the next steps was asked for, but this run has no ProfilerCallback. Add "
                "ProfilerCallback(repeat=0), which records steps only when it is asked to"
            )

    def _step_optimizer(self) -> None:
        run = self.run
        applied = self.update.step()
        run.built.zero_grad()
        run.events.fire("on_optimizer_step")
        if applied and run.scheduler is not None:
            run.scheduler.step()
        run.garbage.after_step(run.state.global_step)

    def _announce_epoch(self) -> None:
        """Tell the data, once, which epoch begins or resumes, and none that does not come."""
        run, epoch = self.run, self.run.state.raw_epoch
        if run.args.set_dataset_epoch and run.announced_epoch != epoch:
            set_loader_epoch(run.loader, epoch)
            run.announced_epoch = epoch

    def _close_epoch(self) -> None:
        """Count the epoch; one that gave nothing may be the rest of a finished one, but not twice."""
        run, state = self.run, self.run.state
        if run.steps_in_epoch == 0 and not run.events.control.should_epoch_stop:
            if self._saw_empty_epoch:
                raise DataError("the training data gave no batch in a whole epoch. Give more data.")
            self._saw_empty_epoch = True
            return
        self._saw_empty_epoch = False
        self._note_a_short_epoch()
        # The counters move first, so that a checkpoint made here begins with the next epoch.
        state.raw_epoch += 1
        state.epoch_start_step = state.global_step
        state.epoch_data_ended = False
        run.progress.generators_before_epoch = None
        if run.events.control.should_epoch_stop:
            leave_epoch(run.loader)
        run.update_epoch()
        self.actions.after_epoch()

    def _epoch_is_complete(self) -> bool:
        """Whether the epoch is known to have no more data.

        By its length, because the loader moved on, or because it had at the last step, or that found too few
        microbatches: a loader that has seen its end begins anew after a resume, and may have saved no epoch.
        """
        run, state = self.run, self.run.state
        moved_on = self._loader_moved_on() or state.epoch_data_ended
        # A rank that does not read the data itself may not know.
        return run.ranks.any([moved_on])[0] or (0 < run.steps_in_epoch == state.epoch_train_steps)

    def _loader_moved_on(self) -> bool:
        """Whether the loader says that it stands in a later epoch."""
        return (epoch_of(self.run.loader) or 0) > self.run.state.raw_epoch

    def _note_a_short_epoch(self) -> None:
        run = self.run
        promised = run.state.epoch_train_steps
        if promised and math.ceil(run.steps_in_epoch) < promised and not run.events.control.should_epoch_stop:
            limited = run.args.epoch_limit is not None
            logger.warning(
                "the training data ended after %d optimizer steps, and %s promised %d%s",
                run.steps_in_epoch,
                "its length" if run.args.epoch_train_steps is None else "epoch_train_steps",
                promised,
                "; the run ends after its epochs, not at the step count shown" if limited else "",
            )

    def _note_a_long_epoch(self) -> None:
        promised = self.run.args.epoch_train_steps
        if promised is not None and self.run.steps_in_epoch == promised + 1:
            logger.warning(
                "the training data continue after the %d optimizer steps of an epoch that epoch_train_steps "
                "promised; the epochs shown are wrong, and the run ends at the step count shown",
                promised,
            )

    def _run_is_over(self) -> bool:
        state = self.run.state
        if self.run.events.control.ends_run or 0 <= state.max_steps <= state.global_step:
            return True
        limit = self.run.args.epoch_limit
        return limit is not None and limit <= state.raw_epoch

    def _say_if_nothing_is_left(self) -> None:
        """Say so where the same script, or a cell of a notebook, is run again after the end of the run."""
        run, state = self.run, self.run.state
        if state.global_step == 0 or run.events.control.ends_run or not self._run_is_over():
            return
        length = f" of {state.max_steps}" if state.max_steps >= 0 else f", epoch {state.epoch:g}"
        logger.info(
            "nothing left to train: step %d%s. A larger max_steps or num_train_epochs continues the run; "
            "for a new one call train(fresh=True) or choose another output_dir",
            state.global_step,
            length,
        )

    def _sync_control(self) -> None:
        """Make what one rank asks for, or was asked by a signal, the wish of all ranks."""
        run, control, cause = self.run, self.run.events.control, self.stops.cause
        stop, *flags = run.ranks.any([cause is not None, *vars(control).values()])
        for name, raised in zip(vars(control), flags, strict=True):
            setattr(control, name, raised)
        if stop and not control.should_training_stop:
            event = "time limit" if cause == "max_train_seconds" else "signal"
            run.events.stop(StopCause(cause or "a signal", event, aborted=False))
        self._tell_stop_cause()

    def _tell_stop_cause(self) -> None:
        """Let every rank know who ends the run, and log it: callbacks may have asked on one rank only.

        An InfoCallback tells it at the end, in its own words.
        """
        run, control = self.run, self.run.events.control
        if not control.ends_run or self._told_abort is control.should_abort_without_save:
            return
        self._told_abort = control.should_abort_without_save
        own = run.events.stop_cause
        told = None if own is None else own._asdict()
        causes = [StopCause(**found) for found in gather_objects(told, run.ranks.env) if found is not None]
        # The one that aborts, if any does; of several the lowest rank's. "a signal" was got by another rank.
        causes.sort(key=lambda found: (not found.aborted, found.name == "a signal"))
        if causes:
            run.events.stop_cause = causes[0]
        if causes and not any(isinstance(callback, InfoCallback) for callback in run.events.callbacks):
            name, event, aborted = causes[0]
            manner = "is aborted without a checkpoint" if aborted else "stops"
            logger.info("the run %s after step %d: %s, in %s", manner, run.state.global_step, name, event)
