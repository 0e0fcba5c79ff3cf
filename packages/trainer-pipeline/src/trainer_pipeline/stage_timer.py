"""How long the stages of a rank compute, and how long the rank waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_HELD = 64
"""Schedules whose moments are kept; older ones are added up as soon as the device has passed them."""


class Work(NamedTuple):
    """Something that a stage computed."""

    stage: int
    kind: str
    """F forward, B backward, I backward of the inputs, W backward of the weights."""
    microbatch: int
    start: float
    """Seconds since the beginning of the schedule."""
    end: float


class RecordedStep(NamedTuple):
    """A schedule that a rank has carried out."""

    began: float
    """Seconds on the clock of the host (`time.perf_counter`), which the ranks of a host have in common."""
    work: list[Work]


class StageTimer:
    """Adds up busy and whole time of the schedules that a rank carries out.

    On an accelerator its own events tell the time, so that nothing waits for it before the figures are read.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[_Step] = []
        self._busy = self._whole = 0.0
        self._step: _Step | None = None
        self.recording: list[RecordedStep] | None = None
        """Give it a list to have every schedule put into it."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around everything that is done for a schedule."""
        self._step = _Step(self.now())
        try:
            yield
        finally:
            self._step.end = self.now()
            step, self._step = self._step, None
            self._steps.append(step)
            if self.recording is not None:
                self.recording.append(RecordedStep(step.began.host, step.work()))
            # The host is at most some launches ahead, so few more are ever held. To add up the newest one,
            # too, would wait for the device in a step that logs nothing.
            while len(self._steps) > _HELD and self._steps[0].end.has_passed():
                self._add_up(self._steps.pop(0))

    def now(self) -> Mark:
        """This moment."""
        return Mark(self._device)

    def add(self, stage: int, kind: str, microbatch: int, began: Mark) -> None:
        """Note what a stage has computed since a moment; see `Work`."""
        if self._step is not None:
            self._step.parts.append((stage, kind, microbatch, began, self.now()))

    def take(self) -> tuple[float, float]:
        """Busy and whole seconds of the schedules since the last call; waits for the device."""
        for step in self._steps:
            self._add_up(step)
        self._steps.clear()
        taken = self._busy, self._whole
        self._busy = self._whole = 0.0
        return taken

    def _add_up(self, step: _Step) -> None:
        self._busy += sum(work.end - work.start for work in step.work())
        self._whole += step.seconds()


class Mark:
    """A moment, on the host or on the device."""

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter()
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device=device, enable_timing=True)
            self._event.record()

    def has_passed(self) -> bool:
        """Whether it is over; those of the stream before it are then as well."""
        return self._event is None or self._event.query()

    def since(self, earlier: Mark) -> float:
        """Seconds."""
        if self._event is None or earlier._event is None:
            return self.host - earlier.host
        if not self.has_passed():
            self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class _Step:
    def __init__(self, began: Mark) -> None:
        self.began = began
        self.end = began
        self.parts: list[tuple[int, str, int, Mark, Mark]] = []

    def seconds(self) -> float:
        return self.end.since(self.began)

    def work(self) -> list[Work]:
        return [
            Work(stage, kind, microbatch, start.since(self.began), end.since(self.began))
            for stage, kind, microbatch, start, end in self.parts
        ]
