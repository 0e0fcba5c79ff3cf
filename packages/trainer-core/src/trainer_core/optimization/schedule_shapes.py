"""The learning rate over time: factors of the initial rate, by optimizer step.

The formulas are those of `transformers.get_scheduler` (transformers 5, module optimization), so that a run
moved here keeps its learning rates to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Factor = Callable[[int], float]
"""Maps the number of optimizer steps made to a factor of the initial learning rate."""


@dataclass(frozen=True)
class Constant:
    """The initial rate, after a linear warm-up."""

    warmup: int = 0

    def __call__(self, step: int) -> float:
        return _rise(step, self.warmup) if step < self.warmup else 1.0


@dataclass(frozen=True)
class Linear:
    """Down to zero in a straight line."""

    warmup: int
    total: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Down along a cosine; half a cycle ends at `floor`."""

    warmup: int
    total: int
    cycles: float = 0.5
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        wave = _wave(_progress(step, self.warmup, self.total), self.cycles)
        return max(0.0, wave * (1 - self.floor) + self.floor)


@dataclass(frozen=True)
class CosineWithRestarts:
    """Half a cosine down to zero, `cycles` times, each from the full rate."""

    warmup: int
    total: int
    cycles: int = 1

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        progress = _progress(step, self.warmup, self.total)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(self.cycles) * progress) % 1.0))))


@dataclass(frozen=True)
class CosineWithWarmupFloor:
    """A cosine to a floor that counts steps from one, so that the first step learns already.

    The warm-up rises from `warmup_floor`, or from one step's worth when that is not given.
    """

    warmup: int
    total: int
    cycles: float = 0.5
    floor: float = 0.0
    warmup_floor: float | None = None

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            if self.warmup_floor is None:
                return (step + 1.0) / max(1.0, self.warmup)
            return self.warmup_floor + (1.0 - self.warmup_floor) * step / max(1, self.warmup - 1)
        progress = (step - self.warmup + 1.0) / max(1.0, self.total - self.warmup)
        return max(0.0, _wave(progress, self.cycles) * (1 - self.floor) + self.floor)


@dataclass(frozen=True)
class Polynomial:
    """From `initial` to `end` (both learning rates) along a power of what is left."""

    warmup: int
    total: int
    initial: float
    end: float = 1e-7
    power: float = 1.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        if step > self.total or self.total == self.warmup:
            return self.end / self.initial
        left = 1 - (step - self.warmup) / (self.total - self.warmup)
        remaining: float = left**self.power
        return ((self.initial - self.end) * remaining + self.end) / self.initial


@dataclass(frozen=True)
class InverseSquareRoot:
    """One over the square root of the steps made, in units of `timescale` steps."""

    warmup: int
    timescale: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        return 1.0 / math.sqrt((step + self.timescale - self.warmup) / self.timescale)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Three stages: up from the floor, level, down to the floor."""

    warmup: int
    stable: int
    decay: int
    warmup_type: str = "linear"
    decay_type: str = "cosine"
    floor: float = 0.0
    cycles: float = 0.5

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self._above_floor(_ramp_up(self.warmup_type, _rise(step, self.warmup)))
        into_decay = step - self.warmup - self.stable
        if into_decay < 0:
            return 1.0
        if into_decay < self.decay:
            progress = into_decay / max(1, self.decay)
            return self._above_floor(_ramp_down(self.decay_type, progress, self.cycles))
        return self.floor

    def _above_floor(self, factor: float) -> float:
        return max(0.0, factor * (1.0 - self.floor) + self.floor)


def _rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _progress(step: int, start: int, end: int) -> float:
    return (step - start) / max(1, end - start)


def _wave(progress: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress))


def _ramp_up(kind: str, progress: float) -> float:
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    return progress if kind == "linear" else 1.0 - math.sqrt(1.0 - progress)


def _ramp_down(kind: str, progress: float, cycles: float) -> float:
    if kind == "cosine":
        return _wave(progress, cycles)
    return 1.0 - progress if kind == "linear" else 1.0 - math.sqrt(progress)
