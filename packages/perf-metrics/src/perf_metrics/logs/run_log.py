"""One run as its log tells it: one value for each step and key, also after a resume."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..records import is_final, is_training
from .formats import LOG_FILENAME, STATE_FILENAME, find_log
from .log_entry import JsonValue, LogEntry
from .log_file import load_logs

TOKEN_KEYS = ("total_tokens", "num_input_tokens_seen")
"""The running count of tokens: ours (those counted in the loss), or else that of Hugging Face's trainer."""


@dataclass(frozen=True)
class Series:
    """Values of one key over the steps, in the order of the steps; nan where null was logged."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> list[float]:
        """Return the values that are numbers."""
        return [value for value in self.values if math.isfinite(value)]

    def __bool__(self) -> bool:
        return any(math.isfinite(value) for value in self.values)


@dataclass(frozen=True)
class RunLog:
    """The entries of a log, without those that a resume has made void.

    A run that goes on from a checkpoint does steps anew. Where training comes back to a step that it had
    reached before, the entries from that step on are void, as they are for `JsonLogger`; and of two values
    for one key and step, the later one counts.
    """

    path: Path
    written: tuple[LogEntry, ...]
    """Every entry with a step, as written."""
    entries: tuple[LogEntry, ...]
    """Those that count."""
    resumes_seen: int
    """How often training came back to an earlier step."""

    def series(self, key: str, reduce: Callable[[Sequence[float]], float] = max) -> Series:
        """Return the values of a key; of a list (one element per rank) what `reduce` makes of it.

        The final entry is left out, but for running counts: its figures are those of the whole run.
        """
        found = {
            step_of(entry): _as_number(entry[key], reduce)
            for entry in self.entries
            if key in entry and (key in TOKEN_KEYS or not is_final(entry))
        }
        steps = sorted(found)
        return Series(tuple(steps), tuple(found[step] for step in steps))

    def tokens_at(self, step: float) -> float:
        """Return the tokens seen at a step: as logged, or on the line between its neighbours.

        Nan beyond the last step for which they are known.
        """
        steps, counts = self._tokens
        after = bisect_left(steps, step)
        if after == len(steps):
            return math.nan
        if steps[after] == step:
            return counts[after]
        if after == 0:
            return math.nan
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return counts[after - 1] + share * (counts[after] - counts[after - 1])

    @property
    def has_tokens(self) -> bool:
        """Whether the log says at any step how many tokens were seen."""
        return len(self._tokens[0]) > 1

    @cached_property
    def _tokens(self) -> tuple[list[float], list[float]]:
        """Steps and counts of tokens; a run begins with none, which is where a first evaluation may stand."""
        for key in TOKEN_KEYS:
            series = self.series(key)
            if series:
                points = zip(series.steps, series.values, strict=True)
                known = {0.0: 0.0} | {step: count for step, count in points if math.isfinite(count)}
                return list(known), list(known.values())
        return [0.0], [0.0]


def read_run(path: str | Path) -> RunLog:
    """Read the log of a run; see `load_logs` for the paths, the files and the errors."""
    path = Path(path)
    written = tuple(entry for entry in load_logs(path) if not math.isnan(step_of(entry)))
    entries, resumes = _without_void(written)
    return RunLog(path, written, tuple(entries), resumes)


def step_of(entry: LogEntry) -> float:
    """Return the step of an entry, or nan if it has none."""
    step = _as_number(entry.get("global_step"), max)
    return step if math.isfinite(step) else math.nan


def number_of(entry: LogEntry, *keys: str) -> float | None:
    """Return the first of these keys of an entry that is a finite number, or None."""
    for key in keys:
        number = _as_number(entry.get(key), max)
        if math.isfinite(number):
            return number
    return None


def default_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each log: its directory or file, with as much before it as tells them apart."""
    files = [find_log(path).resolve() for path in paths]
    parts = [_name_parts(file) for file in files]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(files)):
            return names
    return [str(path) for path in paths]


def _name_parts(file: Path) -> list[str]:
    stands_for_directory = file.name in (LOG_FILENAME, STATE_FILENAME)
    named = file.parent if stands_for_directory else file.with_suffix("")
    return [part for part in named.parts if part != named.anchor]


def _without_void(written: Sequence[LogEntry]) -> tuple[list[LogEntry], int]:
    kept: list[LogEntry] = []
    resumes = 0
    last = -math.inf
    for entry in written:
        if is_training(entry):
            step = step_of(entry)
            if step <= last:
                resumes += 1
                kept = [other for other in kept if step_of(other) < step]
            last = step
        kept.append(entry)
    return kept, resumes


def _as_number(value: JsonValue, reduce: Callable[[Sequence[float]], float]) -> float:
    if isinstance(value, list):
        # One element per rank; lists within lists are nothing that this package writes.
        numbers = [math.nan if isinstance(one, list) else _as_number(one, reduce) for one in value]
        finite = [number for number in numbers if math.isfinite(number)]
        return reduce(finite) if finite else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
