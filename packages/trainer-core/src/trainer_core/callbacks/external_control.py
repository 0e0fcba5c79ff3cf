"""The callback that lets a person or a script steer a run through a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dist_env import get_logger

from ..errors import ConfigurationError
from .files import write_text

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)

WORDS = {
    "save": "should_save",
    "stop": "should_training_stop",
    "log": "should_log",
    "evaluate": "should_evaluate",
    "abort": "should_abort_without_save",
    "profile": "should_profile",
}
"""What can be asked for, and the flag of `TrainerControl` that it raises."""


class ExternalControl:
    """Serves words written into a file: save, stop, log, evaluate, abort, profile.

        echo save log > output/control

    Acts at on_step_end: rank 0 looks whether the file is there (`os.stat`, nothing else), takes it away,
    raises the flags it names, and answers with a line of JSON in `<path>.status`: the words, step, epoch,
    last logged loss and seconds to go. A file with a word that is not known is not served at all; it is kept
    as `<path>.rejected` and a warning names the known words. An empty file is left alone: somebody is
    writing it. A file that is there when training begins is served after the first step.

    Args:
        path: The file; `<output_dir>/control` when not given.
        every_steps: Steps between two looks, 1 or more.
        every_seconds: Seconds between two looks at least, 0 or more.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    name = "external_control"

    def __init__(
        self, path: str | Path | None = None, *, every_steps: int = 1, every_seconds: float = 1.0
    ) -> None:
        if every_steps < 1:
            raise ConfigurationError(
                "every_steps", every_steps, "must be 1 or more", "give a whole number, such as 10"
            )
        if not every_seconds >= 0:
            raise ConfigurationError(
                "every_seconds", every_seconds, "must be 0 or more", "give seconds, such as 30"
            )
        self._given_path = path
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._path = Path()
        self._next_look = 0.0
        self._begin_step = 0
        self._begin_time = 0.0
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Settle the path and start the clock.

        Raises:
            ConfigurationError: The path is a directory.
        """
        self._path = args.run_path / "control" if self._given_path is None else Path(self._given_path)
        if self._path.is_dir():
            raise ConfigurationError(
                "path", str(self._path), "is a directory", "give the path of a file in it"
            )
        self._begin_step, self._begin_time = state.global_step, time.monotonic()
        self._next_look = 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Look for the file, and serve it."""
        if not state.is_world_process_zero or state.global_step % self._every_steps:
            return
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._every_seconds
        if self._is_there():
            self._serve(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        """Remember the loss for the answer."""
        loss = logs.get("loss")
        if isinstance(loss, int | float):
            self._loss = float(loss)

    def _is_there(self) -> bool:
        try:
            return os.stat(self._path).st_size > 0  # noqa: PTH116 - one system call, at every look
        except FileNotFoundError:
            return False

    def _serve(self, state: TrainerState, control: TrainerControl) -> None:
        words = self._take()
        if words is None:
            return
        for word in words:
            setattr(control, WORDS[word], True)
        logger.info("%s asks at step %d for: %s", self._path, state.global_step, ", ".join(words))
        write_text(self._beside("status"), json.dumps(self._status(words, state)) + "\n")

    def _take(self) -> list[str] | None:
        """Take the file away and return its words; None for one that is rejected or gone."""
        taken = self._beside("taken")
        try:
            # Renamed first, so that what somebody writes from now on is a new file.
            self._path.replace(taken)
        except FileNotFoundError:
            return None  # whoever wrote it has taken it back
        text = taken.read_text(encoding="utf-8", errors="replace")
        words = text.lower().split()
        unknown = [word for word in words if word not in WORDS]
        if not unknown:
            taken.unlink()
            return words
        rejected = self._beside("rejected")
        taken.replace(rejected)
        logger.warning(
            "%s: unknown %s; known are %s. Nothing in it was served; it is kept as %s",
            self._path,
            ", ".join(repr(word) for word in unknown),
            ", ".join(WORDS),
            rejected,
        )
        return None

    def _status(self, words: list[str], state: TrainerState) -> dict[str, object]:
        return {
            "served": words,
            "step": state.global_step,
            "max_steps": state.max_steps if state.max_steps >= 0 else None,
            "epoch": state.epoch,
            # JSON has no nan.
            "loss": self._loss if self._loss is not None and abs(self._loss) < float("inf") else None,
            "eta_seconds": self._seconds_to_go(state),
            "time": time.time(),
        }

    def _seconds_to_go(self, state: TrainerState) -> float | None:
        done = state.global_step - self._begin_step
        if done < 1 or state.max_steps < 0:
            return None
        return round((time.monotonic() - self._begin_time) / done * (state.max_steps - state.global_step), 1)

    def _beside(self, ending: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{ending}")
