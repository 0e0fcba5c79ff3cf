"""Cutting a long time into queries whose answers are of a good size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .prometheus_api import MOST_POINTS, QueryTooLargeError

Progress: TypeAlias = Callable[[float], object]
"""Called with the seconds that have been read more."""

_FIRST_STEPS = 120
_POINTS_WANTED = 200_000
"""Points in an answer: some megabytes of JSON, whatever the size of the fleet."""


def read_in_chunks(
    read: Callable[[float, float], int], start: float, end: float, step_s: float, progress: Progress
) -> None:
    """Call `read` for one stretch after another, ends included, until all steps have been read.

    Args:
        read: Reads from a first to a last Unix time in seconds, and returns the number of points. When it
            raises QueryTooLargeError, it is called again with a shorter stretch.
        start: Unix time of the first step in seconds.
        end: Unix time in seconds that no step passes.
        step_s: Seconds between steps.
        progress: Called after each stretch.

    Raises:
        QueryTooLargeError: Even one step is too much for the server.
    """
    left, done, wanted = int((end - start) // step_s) + 1, 0, _FIRST_STEPS
    while left:
        steps = min(wanted, left)
        first = start + done * step_s
        try:
            points = read(first, first + (steps - 1) * step_s)
        except QueryTooLargeError:
            if steps == 1:
                raise
            wanted = max(1, steps // 4)
            continue
        progress(steps * step_s)
        done, left = done + steps, left - steps
        # At most twice as long, as a busy hour may follow a quiet one.
        wanted = max(1, min(2 * steps, MOST_POINTS, steps * _POINTS_WANTED // max(1, points)))
