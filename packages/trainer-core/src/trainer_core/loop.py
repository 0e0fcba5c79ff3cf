"""The training loop: epochs of optimizer steps, each over a window of microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from .actions import Actions
from .batch import Batch, Window, next_window
from .errors import DataError
from .interrupt import InterruptGuard
from .loaders import enter_epoch, epoch_of
from .run import Run
from .state import StopCause, TrainOutput


class TrainingLoop:
    """Runs from the state's step to the end of the run.

    Args:
        run: A prepared run with training data.
        actions: What is done between steps.
        interrupt: Tells of Ctrl-C and SIGTERM.
    """

    def __init__(self, run: Run, actions: Actions, interrupt: InterruptGuard) -> None:
        self.run = run
        self.actions = actions
        self.interrupt = interrupt
        self._saw_empty_epoch = False

    def train(self) -> TrainOutput:
        """Train, save and sum up."""
        run = self.run
        run.parallel.model.train()
        run.parallel.zero_grad()
        run.meter.start()
        run.speed.begin(run.state)
        run.events.fire("on_train_begin")
        if (epoch_of(run.loader) or 0) > run.state.raw_epoch:
            self._close_epoch()  # the checkpoint is of the last step of an epoch, and the loader has moved on
        while not self._run_is_over():
            self._train_epoch()
        self.actions.after_run()
        metrics = run.speed.summary(run.state)
        if "train_runtime" in metrics:
            self.actions.log(dict(metrics))
        run.events.fire("on_train_end")
        return TrainOutput(run.state.global_step, metrics)

    def _train_epoch(self) -> None:
        run = self.run
        enter_epoch(run.loader, run.state.raw_epoch)
        batches = iter(cast(Iterable[Batch], run.loader))
        control = run.events.control
        control.should_epoch_stop = False
        run.events.fire("on_epoch_begin")
        ended = False
        while not (ended or self._run_is_over()):
            with run.meter.measure("data"):
                window = next_window(batches, run.args.gradient_accumulation_steps, run.loss)
            if window is not None:
                self._train_step(window)
                self.actions.after_step()
            ended = window is None or control.should_epoch_stop
        if ended or (run.steps_in_epoch == run.state.epoch_train_steps and not control.ends_run):
            self._close_epoch()
        run.events.fire("on_epoch_end")

    def _train_step(self, window: Window) -> None:
        run, events = self.run, self.run.events
        events.fire("on_step_begin")
        tokens = run.parallel.sum(window.target_tokens)
        loss_sum = self._forward_backward(window.batches, tokens.clamp(min=1))
        grad_norm = run.parallel.clip_grad_norm(run.args.max_grad_norm)
        events.fire("on_pre_optimizer_step")
        self._step_optimizer()
        local_loss = loss_sum / window.target_tokens.clamp(min=1)
        events.fire("on_train_metrics", loss=local_loss, grad_norm=grad_norm, tokens=window.target_tokens)
        run.interval.add(window, loss_sum, grad_norm)
        run.state.global_step += 1
        run.update_epoch()
        events.fire("on_step_end")
        if run.speed.starts_after(run.state):
            run.interval.flush()
            run.speed.mark(run.state)

    def _forward_backward(self, batches: list[Batch], denominator: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the token losses on this rank."""
        run = self.run
        loss_sum = torch.zeros((), device=run.parallel.device)
        for number, batch in enumerate(batches, start=1):
            run.events.fire("on_forward_backward_begin")
            last = number == len(batches)
            loss_sum += run.parallel.forward_backward(
                batch, run.loss, run.args, denominator=denominator, last=last
            )
            run.events.fire("on_forward_backward_end")
        return loss_sum

    def _step_optimizer(self) -> None:
        run = self.run
        if run.optimizer is None:
            raise RuntimeError("the optimizer is built before the first step")
        run.learning_rate = float(run.optimizer.param_groups[0]["lr"])
        run.optimizer.step()
        run.parallel.zero_grad()
        run.events.fire("on_optimizer_step")
        if run.scheduler is not None:
            run.scheduler.step()

    def _close_epoch(self) -> None:
        """Count the epoch; one that gave nothing may be the rest of a finished one, but not twice."""
        run, state = self.run, self.run.state
        if run.steps_in_epoch == 0:
            if self._saw_empty_epoch:
                raise DataError("the training data gave no batch in a whole epoch; give more data")
            self._saw_empty_epoch = True
            return
        self._saw_empty_epoch = False
        # Counters and loader move first, so that a checkpoint made here begins with the next epoch.
        state.raw_epoch += 1
        state.epoch_start_step = state.global_step
        enter_epoch(run.loader, state.raw_epoch)
        run.update_epoch()
        self.actions.after_epoch()

    def _run_is_over(self) -> bool:
        state, control = self.run.state, self.run.events.control
        self._heed_interrupt()
        if control.ends_run or 0 <= state.max_steps <= state.global_step:
            return True
        return 0 <= state.num_train_epochs <= state.raw_epoch

    def _heed_interrupt(self) -> None:
        """Turn a signal on any rank into a request to stop on all of them."""
        events, received = self.run.events, self.interrupt.received
        if not self.run.parallel.any([received is not None])[0] or events.control.should_training_stop:
            return
        name = received.name if received else "a signal on another rank"
        events.control.should_training_stop = True
        events.stop_cause = StopCause(name, "signal", aborted=False)
