"""What a launcher knows of its restarts: how many are left, what was lost, and how long each took."""

from __future__ import annotations

import signal
import sys
import time
from itertools import pairwise

from .console import PROG


class Restarts:
    """Counts the restarts of a job, and says what happens.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self._last_step = 0
        self._lost_at: float | None = None
        """When the rank was lost whose restart is under way; None once that has got further."""
        self._times: list[float] = []

    @property
    def left(self) -> int:
        """How many there may still be."""
        return self.most - self.done

    def begin(self, rank: int, code: int, lost_at: float) -> bool:
        """Begin a restart, if one is left, and say why.

        Args:
            rank: The rank that was lost first.
            code: Its exit code, negative for a signal.
            lost_at: When that was seen, by the monotonic clock.

        Returns:
            Whether there is to be one.
        """
        if not self.most:
            return False
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"lost, with exit code {code}"
        if not self.left:
            _say(f"rank {rank} was {how}, and all {self.most} restarts are used.")
            return False
        self.done += 1
        self._lost_at, self._times = lost_at, [lost_at]
        _say(f"rank {rank} was {how}. Restart {self.done} of {self.most} begins.")
        return True

    def note_start(self) -> None:
        """The ranks were started, and those before them have ended."""
        self._note(1)

    def note_connected(self) -> None:
        """The ranks have met, and own the output directory."""
        self._note(2)

    def note_begin(self, step: int, checkpoint: str) -> None:
        """Training begins.

        Args:
            step: The step that it continues at.
            checkpoint: What it continues from, in words.
        """
        if self._lost_at is None:
            self._last_step = step
            return
        self._note(3)
        again = self._last_step - step
        # A step that was under way is not known to the launcher, and was not done.
        told = (
            f"{again} step{'s are' if again != 1 else ' is'} done again" if again > 0 else "no step is lost"
        )
        _say(f"restart {self.done} of {self.most}: continues at step {step} from {checkpoint}; {told}.")

    def note_step(self, step: int) -> None:
        """A step is done."""
        if step <= self._last_step:
            return
        self._last_step = step
        if self._lost_at is not None and len(self._times) == 4:
            times = [*self._times, time.monotonic()]
            spent = [f"{after - before:.2f} s" for before, after in pairwise(times)]
            _say(
                f"restart {self.done} of {self.most}: step {step} was done {times[-1] - times[0]:.2f} s "
                f"after the loss: {spent[0]} to end the ranks, {spent[1]} to start and connect, "
                f"{spent[2]} to build and load, {spent[3]} for steps."
            )
        self._lost_at = None

    def _note(self, place: int) -> None:
        if self._lost_at is not None and len(self._times) == place:
            self._times.append(time.monotonic())


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
