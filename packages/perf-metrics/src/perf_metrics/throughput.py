"""A stopwatch for training windows: gross time, net time, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Lap:
    """One window of a `ThroughputMeter`.

    Attributes:
        gross_seconds: Wall time of the window, everything included.
        net_seconds: Wall time less the excluded phases.
        phases: Seconds by phase name, for excluded and measured phases alike.
    """

    gross_seconds: float
    net_seconds: float
    phases: Mapping[str, float]

    def per_second(self, count: float) -> float | None:
        """Return `count` per net second, or None when no net time has passed."""
        return count / self.net_seconds if self.net_seconds > 0 else None

    def share(self, phase: str) -> float | None:
        """Return a measured phase's share of the net time, 0 to 1, or None when no net time has passed."""
        return self.per_second(self.phases.get(phase, 0.0))


class ThroughputMeter:
    """Measures windows of a training loop on the host's clock.

    The meter runs from the moment it is made; `start` sets it back to zero. Each second of a window belongs
    to one phase at most: to the innermost open excluded phase, else to the innermost open measured phase. So
    a save inside an evaluation is subtracted once, and waiting for evaluation data is not counted as waiting
    for training data. Gross minus net seconds is always the sum over the excluded phases.

    GPU work is queued: read the clock (`lap`) after something that waits for the device, such as bringing the
    loss to the host, or the window comes out too short. Use one meter from one thread.

    Args:
        clock: Returns seconds from any fixed origin and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[_Phase] = []
        self._excluded: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._kinds: dict[str, bool] = {}
        self._window_start = self._mark = clock()

    def start(self) -> None:
        """Begin a new window now and forget the current one. Phases that are open stay open."""
        self._begin_window(self._clock())

    def exclude(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager whose time is left out of the net time (evaluation, saving, warm-up).

        Args:
            phase: Name under which the seconds appear in `Lap.phases`.

        Raises:
            ValueError: The name was used for a measured phase before.
        """
        return self._phase(phase, excluded=True)

    def measure(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager whose time is noted but stays in the net time (waiting for data).

        Args:
            phase: Name under which the seconds appear in `Lap.phases`.

        Raises:
            ValueError: The name was used for an excluded phase before.
        """
        return self._phase(phase, excluded=False)

    def lap(self) -> Lap:
        """End the current window, begin the next at the same instant, and return the ended one.

        A phase that is open is split at this instant: each window gets its part.
        """
        now = self._advance()
        gross = now - self._window_start
        lap = Lap(
            gross_seconds=gross,
            net_seconds=gross - sum(self._excluded.values()),
            phases=MappingProxyType({**self._measured, **self._excluded}),
        )
        self._begin_window(now)
        return lap

    def _phase(self, name: str, *, excluded: bool) -> AbstractContextManager[None]:
        if self._kinds.setdefault(name, excluded) != excluded:
            before, now = ("excluded", "measured") if not excluded else ("measured", "excluded")
            raise ValueError(f"phase {name!r} was {before} before and cannot be {now} too; use another name")
        return _Phase(self, name, excluded)

    def _enter(self, phase: _Phase) -> None:
        self._advance()
        self._open.append(phase)

    def _leave(self, phase: _Phase) -> None:
        self._advance()
        self._open.remove(phase)

    def _advance(self) -> float:
        """Give the time since the last change to the phase that owns it; return the time now."""
        now = self._clock()
        if self._open:
            owner = next((phase for phase in reversed(self._open) if phase.excluded), self._open[-1])
            totals = self._excluded if owner.excluded else self._measured
            totals[owner.name] = totals.get(owner.name, 0.0) + now - self._mark
        self._mark = now
        return now

    def _begin_window(self, now: float) -> None:
        self._excluded, self._measured = {}, {}
        self._window_start = self._mark = now


class _Phase(AbstractContextManager[None]):
    """One stretch of a phase. A class, because a generator costs several times as much at every step."""

    __slots__ = ("_meter", "excluded", "name")

    def __init__(self, meter: ThroughputMeter, name: str, excluded: bool) -> None:
        self._meter = meter
        self.name = name
        self.excluded = excluded

    def __enter__(self) -> None:
        self._meter._enter(self)

    def __exit__(self, *error: object) -> None:
        self._meter._leave(self)
