"""Times of steps, whoever makes them: a step is over when an optimizer has stepped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .memory import PeakMemory
from .options import LOG_EVERY


@dataclass(frozen=True)
class Window:
    """Mean seconds per step of consecutive steps.

    Attributes:
        wall_s: On the clock.
        cpu_s: Of processors, of all threads of the process together.
    """

    wall_s: float
    cpu_s: float


class StepClock:
    """Counts steps of all optimizers of this process, and times windows of steps after the warm-up.

    The device is waited for at the ends of windows only, so that it may run behind within them. A window is
    as long as contenders go without a log entry, for which they wait as well.

    Args:
        warm_up: Steps before the first window.
        steps: Steps of all windows, a multiple of `LOG_EVERY`.
        device: Where the steps are computed.
        memory: Its measurement ends with the last window.
    """

    def __init__(self, warm_up: int, steps: int, device: torch.device, memory: PeakMemory) -> None:
        self.count = 0
        """Steps so far."""
        self._first, self._last = warm_up, warm_up + steps
        self._device, self._memory = device, memory
        self._times: list[tuple[float, float]] = []

    def __enter__(self) -> StepClock:
        """Begin to count."""
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        self._hook.remove()

    def windows(self) -> list[Window]:
        """What was measured, oldest first.

        Raises:
            RuntimeError: The contender made another number of steps than it was told to.
        """
        if self.count != self._last:
            raise RuntimeError(f"made {self.count} optimizer steps, not {self._last}")
        return [
            Window((later[0] - earlier[0]) / LOG_EVERY, (later[1] - earlier[1]) / LOG_EVERY)
            for earlier, later in pairwise(self._times)
        ]

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.count += 1
        if self._first <= self.count <= self._last and (self.count - self._first) % LOG_EVERY == 0:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._times.append((time.perf_counter(), time.process_time()))
        if self.count == self._last:
            self._memory.stop()
