"""Calls the handlers of callbacks, and remembers which one stopped the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .state import StopCause, TrainerControl, TrainerState

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
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
        An error in a handler goes on up, with a note that names callback and event.

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
