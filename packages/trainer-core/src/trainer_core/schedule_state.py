"""A learning-rate schedule as a part of checkpoints, which may be exchanged for another one at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch.optim.lr_scheduler import LRScheduler

from dist_env import get_logger

logger = get_logger(__name__)


class ScheduleState:
    """Saves the schedule; one of another kind goes to the same step instead of taking up the state.

    Args:
        scheduler: The schedule of this run.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, object]:
        """The state, and what kind of schedule it is of."""
        return {"kind": type(self._scheduler).__name__, "state": self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the schedule where the saved one was."""
        inner = cast(dict[str, object], state["state"])
        if state["kind"] == type(self._scheduler).__name__:
            self._scheduler.load_state_dict(inner)
            return
        logger.warning("the checkpoint's schedule is a %s: this one begins at its step", state["kind"])
        go_to_step(self._scheduler, cast(int, inner.get("last_epoch", 0)))


def go_to_step(scheduler: LRScheduler, step: int) -> None:
    """Set a schedule, and the rates that it drives, to where it is after so many steps."""
    scheduler.last_epoch = step - 1
    scheduler.step()
