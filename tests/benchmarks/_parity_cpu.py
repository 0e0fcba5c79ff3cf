"""Processor time of another process, between two moments of its life; Linux tells it."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from pathlib import Path


class CPUTimes:
    """Notes how much processor time a process has used, with all its threads, whenever it is told to.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._times: list[float] = []
        self._seconds: list[float] = []

    def note(self) -> None:
        """Add a note; none where the system tells nothing."""
        if not self._path.exists():
            return
        # The name, in parentheses, may hold spaces; user and system time are the 14th and 15th field.
        fields = self._path.read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        self._times.append(time.time())
        self._seconds.append(ticks / os.sysconf("SC_CLK_TCK"))

    def between(self, begin: float, end: float) -> float:
        """Seconds of processor time between two Unix times; nan without notes around both."""
        return self._at(end) - self._at(begin)

    def _at(self, moment: float) -> float:
        """Seconds until a moment, on the line between the notes before and after it."""
        place = bisect_left(self._times, moment)
        if not 0 < place < len(self._times):
            return math.nan
        (before, after), (low, high) = (
            self._times[place - 1 : place + 1],
            self._seconds[place - 1 : place + 1],
        )
        return low + (high - low) * (moment - before) / (after - before)
