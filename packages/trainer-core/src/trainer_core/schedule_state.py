"""A learning-rate schedule as a part of checkpoints, which may be exchanged for another one at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch.optim.lr_scheduler import LRScheduler

from dist_env import get_logger

logger = get_logger(__name__)


class ScheduleState:
    """Saves the schedule, and leaves alone what a schedule of another kind has saved.

    Args:
        scheduler: The schedule of this run.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.loaded = False
        """Whether it took up the state of a checkpoint."""

    def state_dict(self) -> dict[str, object]:
        """The state, and what kind of schedule it is of."""
        return {"kind": type(self.scheduler).__name__, "state": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the schedule where the saved one was, if it is of the same kind."""
        self.loaded = state["kind"] == type(self.scheduler).__name__
        if self.loaded:
            self.scheduler.load_state_dict(cast(dict[str, object], state["state"]))

    def go_to_step(self, step: int) -> None:
        """Set the schedule, and the rates that it drives, to where it is after so many optimizer steps."""
        kind = type(self.scheduler).__name__
        logger.info("the checkpoint has no state of a %s: it begins at step %d", kind, step)
        self.scheduler.last_epoch = step - 1
        self.scheduler.step()
