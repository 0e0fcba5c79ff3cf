"""Times what lies between the events of a trainer that does not say beforehand what comes next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..compile_time import exclude_compilation
from ..throughput import ThroughputMeter

Kind: TypeAlias = Literal["train", "data", "evaluate", "save"]


@dataclass(frozen=True)
class IntervalTime:
    """The time of one log interval.

    Attributes:
        net_seconds: Training and waiting for data, without evaluation, saving and compilation.
        data_seconds: The part of it that was spent on waiting for data.
    """

    net_seconds: float
    data_seconds: float

    @property
    def data_wait_share(self) -> float | None:
        """Waiting for data as a share of the net time, 0 to 1; None when no time has passed."""
        return self.data_seconds / self.net_seconds if self.net_seconds > 0 else None


class StretchTimer:
    """Sorts the time between events by what it was spent on.

    Some trainers have no event at which an evaluation or a save begins; that it was one is known once it is
    over. So each stretch of time gets its kind when it ends. Compilation is left out of all kinds.

    Args:
        clock: Returns seconds from any fixed origin and never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._meter = ThroughputMeter(clock)
        self._seconds: dict[Kind, float] = {}
        self._compiling = ExitStack()

    def start(self) -> None:
        """Begin a run: forget what was timed before."""
        self.stop()
        self._compiling.enter_context(exclude_compilation(self._meter))
        self._seconds.clear()
        self._meter.start()

    def stop(self) -> None:
        """End a run."""
        self._compiling.close()

    def end(self, kind: Kind) -> None:
        """End the stretch since the last call, which was of this kind, and begin the next."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + self._meter.lap().net_seconds

    def take(self) -> IntervalTime:
        """End the interval with the last stretch that has ended, and return its time."""
        data = self._seconds.get("data", 0.0)
        time = IntervalTime(net_seconds=self._seconds.get("train", 0.0) + data, data_seconds=data)
        self._seconds.clear()
        return time
