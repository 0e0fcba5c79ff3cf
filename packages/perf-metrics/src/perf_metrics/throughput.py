"""Gross and net time of training windows, with compilation and other stretches left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias


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

    def is_measured(self, phase: str) -> bool:
        """Whether a phase is one that was noted and not one that was left out."""
        return self._kinds.get(phase) is False

    def _phase(self, name: str, *, excluded: bool) -> AbstractContextManager[None]:
        if self._kinds.setdefault(name, excluded) != excluded:
            before, now = ("excluded", "measured") if not excluded else ("measured", "excluded")
            raise ValueError(f"phase {name!r} was {before} before and cannot be {now} too. Use another name.")
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


_log = logging.getLogger("perf_metrics")

COMPILE_PHASE = "compile"
"""The excluded phase of `exclude_compilation`."""


@contextmanager
def exclude_compilation(meter: ThroughputMeter) -> Iterator[None]:
    """Leave whatever torch.compile compiles meanwhile out of the net time of a meter.

    Warm-up and recompilations alike, forward and backward, appear as the phase "compile". The rest of the
    step that caused them counts. Nothing is measured of kernels that are tuned when they first run.

    torch reports compilations in `torch._dynamo.callback`. With a torch that has no such reports this raises,
    rather than letting warm-up pass for training.

    Args:
        meter: The meter. Compilations of other models in this process are left out of it as well.

    Raises:
        RuntimeError: This torch does not report when it compiles.
    """
    try:
        # Not at the top: this loads the compiler's front end.
        from torch._dynamo.callback import callback_handler
    except ImportError as error:
        raise RuntimeError(
            "exclude_compilation needs torch._dynamo.callback, which this torch does not have. Leave the "
            "first window out of your figures instead."
        ) from error
    compiling = _Compiling(meter)
    callback_handler.register_start_callback(compiling.begin)
    callback_handler.register_end_callback(compiling.end)
    try:
        yield
    finally:
        if compiling.begin in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(compiling.begin)
        else:
            _log.warning(
                "torch._dynamo.reset() was called meanwhile: what was compiled after it counts as training"
            )
        if compiling.end in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(compiling.end)
        compiling.end()


class _Compiling:
    """The open phase, while something is being compiled."""

    def __init__(self, meter: ThroughputMeter) -> None:
        self._meter = meter
        self._phase: AbstractContextManager[None] | None = None

    def begin(self, _: object) -> None:
        if self._phase is None:
            self._phase = self._meter.exclude(COMPILE_PHASE)
            self._phase.__enter__()

    def end(self, _: object = None) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


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
