"""What a run is at this moment, what callbacks may ask of it, and how their handlers are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dist_env import DistributedEnvInterface

from .arguments import TrainingArguments


@dataclass(kw_only=True)
class TrainerState:
    """Where the run stands; callbacks read it, the trainer alone writes it.

    Token counts are totals over all data-parallel ranks and all sessions of the run.
    """

    logging_steps: int
    eval_steps: int
    train_batch_size: int
    max_steps: int
    """Optimizer steps at which the run ends; -1 while that is unknown."""
    num_train_epochs: float
    """Epochs at which the run ends, by whichever limit; -1 while that is unknown."""
    max_eval_steps: int
    save_steps: int = 0
    epoch: float = 0.0
    """Epochs done; the fraction is known only when the length of an epoch is."""
    global_step: int = 0
    """Optimizer steps completed."""
    session_start_step: int = 0
    """`global_step` at which this call of `train` began."""
    raw_epoch: int = 0
    """Epochs completed."""
    epoch_start_step: float = 0
    """`global_step` at which the current epoch began, if all its steps had the size of now."""
    epoch_data_ended: bool = False
    """Whether the data of the current epoch is known to be used up: its last step had fewer microbatches, or
    the loader had moved on."""
    epoch_train_steps: int | None = None
    """Optimizer steps per epoch, when known."""
    num_processes: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    num_input_tokens_seen: int = 0
    """Non-padding input positions."""
    num_target_tokens_seen: float = 0
    """Positions that counted in the loss, or their weights: whole where these are."""
    total_flos: float = 0.0
    """Model FLOPs, forward and backward."""
    train_loss_sum: float | None = 0.0
    """Loss of the whole run, summed over what counted in applied steps; None if an old checkpoint lacks
    it."""
    train_loss_count: float = 0.0
    """What counted in it."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Every log entry of the run, those of earlier sessions included."""
    best_metric: float | None = None
    """Best value so far of the metric that ranks checkpoints."""
    best_model_checkpoint: str | None = None
    """Directory of the checkpoint with that value."""
    evaluated_step: int = -1
    """Step of the last evaluation of the run's own data."""
    evaluation_pending: bool = False
    """A stop came before the evaluation of this step was done; it is made up for when the run continues."""


@dataclass(kw_only=True)
class TrainerControl:
    """What callbacks ask for; a flag is cleared when it has been served."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False
    should_profile: bool = False
    """Record the next steps: a `ProfilerCallback` clears it at the beginning of the next step."""

    def merge(self, other: TrainerControl) -> None:
        """Raise every flag that is raised in `other`."""
        for name in vars(self):
            if getattr(other, name):
                setattr(self, name, True)

    @property
    def ends_run(self) -> bool:
        """Whether somebody asked to stop or to abort."""
        return self.should_training_stop or self.should_abort_without_save


class StopCause(NamedTuple):
    """Who ended the run before its time, and when."""

    name: str
    """Name of the callback, the signal or the setting."""
    event: str
    """The event during which it asked; `signal` or `time limit` for those."""
    aborted: bool
    """Whether it asked to leave without saving."""

    @property
    def resumable(self) -> bool:
        """Whether the run is to continue when it is started again: a signal or the time limit ended it."""
        return self.event in ("signal", "time limit")


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    metrics: dict[str, float]


def fresh_state(args: TrainingArguments, env: DistributedEnvInterface) -> TrainerState:
    """The state before the first step."""
    return TrainerState(
        logging_steps=args.logging_steps,
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        train_batch_size=args.per_device_train_batch_size,
        max_steps=args.max_steps,
        num_train_epochs=-1 if args.epoch_limit is None else args.epoch_limit,
        max_eval_steps=args.max_eval_steps,
        num_processes=env.world_size,
        is_local_process_zero=env.local_rank == 0,
        is_world_process_zero=env.rank == 0,
    )


EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_exception",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_metrics",
    "on_log_step",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_memory_save",
)
"""Every event. A callback is any object; it has a method for each event it wants."""
Handler = Callable[..., TrainerControl | None]


class CallbackHandler:
    """Fires events at callbacks in the order in which they were added.

    Args:
        callbacks: Objects, or classes that are instantiated without arguments.
        args: The run's arguments, handed to every handler.
        state: The run's state, handed to every handler.
    """

    def __init__(self, callbacks: Iterable[object], args: object, state: TrainerState) -> None:
        self.callbacks: list[object] = []
        self.args = args
        self.state = state
        self.control = TrainerControl()
        self.stop_cause: StopCause | None = None
        self.shared: Mapping[str, object] = {}
        """Keywords that every handler gets: model, optimizer and so on."""
        self._handlers: dict[str, list[tuple[str, Handler]]] = {}
        for callback in callbacks:
            self.add(callback)

    def begin_run(self) -> None:
        """Forget what was asked for, and by whom, before."""
        self.control = TrainerControl()
        self.stop_cause = None

    def add(self, callback: object) -> object:
        """Add a callback, or an instance of a callback class.

        Returns:
            The object added.
        """
        instance = callback() if isinstance(callback, type) else callback
        self.callbacks.append(instance)
        self._handlers.clear()
        return instance

    def pop(self, callback: object) -> object | None:
        """Take out a callback by identity, or the first one of exactly that class.

        Returns:
            The object taken out; None if there was none.
        """
        for position, held in enumerate(self.callbacks):
            if held is callback or type(held) is callback:
                self._handlers.clear()
                return self.callbacks.pop(position)
        return None

    def fire(self, event: str, **extra: object) -> TrainerControl:
        """Call every handler of an event.

        A handler may change the control it is given or return another one, whose raised flags are added.
        An error in a handler propagates, with a note that names callback and event.

        Returns:
            The control after all handlers have run.
        """
        for name, handler in self._handlers_of(event):
            stopped, aborted = self.control.should_training_stop, self.control.should_abort_without_save
            try:
                returned = handler(self.args, self.state, self.control, **self.shared, **extra)
            except Exception as error:
                error.add_note(f"raised by the callback {name} in {event}, step {self.state.global_step}")
                raise
            if isinstance(returned, TrainerControl) and returned is not self.control:
                self.control.merge(returned)
            if self.control.should_abort_without_save and not aborted:
                self.stop_cause = StopCause(name, event, aborted=True)
            elif self.control.should_training_stop and not stopped and self.stop_cause is None:
                self.stop_cause = StopCause(name, event, aborted=False)
        return self.control

    def listens(self, event: str) -> bool:
        """Whether any callback has a handler for an event."""
        return bool(self._handlers_of(event))

    def stop(self, cause: StopCause) -> None:
        """Ask for the end of the run from outside the callbacks; the first cause is kept."""
        self.control.should_training_stop = True
        self.control.should_abort_without_save |= cause.aborted
        if self.stop_cause is None or (cause.aborted and not self.stop_cause.aborted):
            self.stop_cause = cause

    def _handlers_of(self, event: str) -> list[tuple[str, Handler]]:
        found = self._handlers.get(event)
        if found is None:
            found = self._handlers[event] = list(self._find_handlers(event))
        return found

    def _find_handlers(self, event: str) -> Iterable[tuple[str, Handler]]:
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            # Callbacks that suit other trainers too have handlers that are there to do nothing.
            if callable(handler) and not getattr(handler, "does_nothing", False):
                yield callback_name(callback), handler


def callback_name(callback: object) -> str:
    """What messages and checkpoints call a callback: its `name`, or else its class."""
    return str(getattr(callback, "name", type(callback).__name__))
