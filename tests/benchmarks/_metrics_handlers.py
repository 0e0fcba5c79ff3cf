"""What each callback costs by itself: the processor time between the callback before it and the one after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from _metrics_contenders import arguments
from _step_work import Work

from dist_env import StaticDistributedEnvironment
from perf_metrics import DefaultMetrics, JsonLogger, PeakMemory, ProgressCallback
from trainer_core import Trainer

EVENTS = ("on_step_end", "on_log_step", "on_log")
"""The events of a step that one of the callbacks handles."""
EMPTY = "nothing"
"""What lies between two marks without a callback in between: the price of a mark."""


class Mark:
    """A callback that notes the time at each event, and how long ago the mark before it did.

    Args:
        before: The mark before it, if any.
        name: What lies between the two.
    """

    def __init__(self, before: Mark | None, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {}
        self.spent: dict[str, list[int]] = {}
        self._before = before

    def __getattr__(self, event: str) -> Callable[..., None]:
        """A handler of `EVENTS`."""
        if event not in EVENTS:
            raise AttributeError(event)

        def note(*_: object, **__: object) -> None:
            now = time.thread_time_ns()
            if self._before is not None:
                self.spent.setdefault(event, []).append(now - self._before.seen[event])
            self.seen[event] = time.thread_time_ns()

        return note


def measure_handlers(work: Work) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of each callback, by event, with an entry at every step and the price of a mark taken off.

    Returns:
        By callback and event: median, 10th and 90th percentile over the steps.
    """
    work.directory.mkdir(parents=True)
    with (work.directory / "lines.txt").open("w") as lines:
        between: list[Any] = [
            PeakMemory(),
            DefaultMetrics(),
            ProgressCallback(use_tqdm=False, output_stream=lines),
            JsonLogger(),
            None,
        ]
        marks = [Mark(None, "start")]
        callbacks: list[object] = [marks[0]]
        for callback in between:
            marks.append(Mark(marks[-1], type(callback).__name__ if callback else EMPTY))
            callbacks += [callback, marks[-1]] if callback else [marks[-1]]
        Trainer(
            arguments(work, 1),
            model=work.model(),
            train_dataset=work.examples,
            distributed_env=StaticDistributedEnvironment(),
            callbacks=callbacks,
        ).train()
    empty = {event: statistics.median(spent) for event, spent in marks[-1].spent.items()}
    return {
        mark.name: {
            event: _spread([(value - empty[event]) / 1e3 for value in spent])
            for event, spent in mark.spent.items()
        }
        for mark in marks[1:-1]
    }


def _spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "quiet": tenths[0], "high": tenths[-1]}
