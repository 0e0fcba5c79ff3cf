"""Compares two runs by their logs: which is faster, or how long to measure until that can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..display import format_value, text_table
from ..uncertainty import (
    MeanInterval,
    independent_difference,
    interval_json,
    plus_minus,
    shortest_window,
)
from .log_file import JsonValue
from .summary import RunLog, duration, interval_of, read_run

KEYS = ("tok_per_sec", "mfu", "ofu")
"""What is compared where both logs have it."""
_SHARES = ("mfu", "hfu", "ofu")
_HIGHER_IS_BETTER = ("tok_per_sec", *_SHARES)
DIFFERENCE = 0.01
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}

Side: TypeAlias = Literal["A", "B"]


@dataclass(frozen=True)
class Comparison:
    """One key of two runs, A and B.

    Attributes:
        key: Of the log entries.
        first: Mean of A over its time without warm-up, with its interval.
        second: The same of B.
        difference: B - A, with its interval.
        told_difference: What `window_s` is for, in the unit of the key.
        window_s: Seconds, without warm-up, that each of the two takes to tell `told_difference`; None where
            that is not known.
    """

    key: str
    first: MeanInterval
    second: MeanInterval
    difference: MeanInterval
    told_difference: float
    window_s: float | None

    @property
    def higher(self) -> Side | None:
        """Which of the two is higher; None where they cannot be told apart."""
        if self.difference.includes(0) is not False:
            return None
        return "B" if self.difference.mean > 0 else "A"

    @property
    def more_seconds(self) -> tuple[float, float] | None:
        """Seconds that A and B have to be measured longer to tell `told_difference`."""
        if self.window_s is None:
            return None
        first, second = (self.window_s - _seconds(one) for one in (self.first, self.second))
        return max(0.0, first), max(0.0, second)


def compare_logs(
    first: str | Path,
    second: str | Path,
    *,
    keys: Sequence[str] | None = None,
    difference: float = DIFFERENCE,
    skip_steps: int = 0,
) -> list[Comparison]:
    """Compare two runs by their logs, such as two settings.

    Means are over time, without warm-up: the first entry and the first after a resume or a pause do not
    count. The runs are taken as independent of one another (Welch), and the entries of one as a series whose
    neighbours are alike; see `mean_interval`. Runs of one setting differ as well, by their nodes and their
    neighbours on the network, which one run of each cannot tell.

    Args:
        first: Log of A, or a directory that holds it; see `load_logs`.
        second: Log of B.
        keys: Keys of the entries to compare; by default those of "tok_per_sec", "mfu" and "ofu" that both
            logs have.
        difference: Share of A's mean for which to tell how long to measure.
        skip_steps: Steps at the beginning of each run that do not count either.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file is not a log file, a key is in neither or only one of the logs, or an argument is
            out of range.
    """
    if not 0 < difference < 1:
        raise ValueError(f"difference={difference!r} must be a share between 0 and 1, such as 0.01 for 1 %.")
    if skip_steps < 0:
        raise ValueError(f"skip_steps={skip_steps!r} must be 0 or more.")
    runs = read_run(first), read_run(second)
    found = []
    for key in KEYS if keys is None else keys:
        means = [interval_of(run, key, after_step=skip_steps) for run in runs]
        if means[0] is not None and means[1] is not None:
            found.append(_compared(key, means[0], means[1], difference))
        elif keys is not None:
            lacking = [str(run.path) for run, mean in zip(runs, means, strict=True) if mean is None]
            raise ValueError(f"{' and '.join(lacking)} have no {key} after warm-up. {_keys_of(runs)}")
    if not found:
        names = ", ".join(keys or KEYS)
        raise ValueError(f"behind what is skipped the logs have none of {names} in common. {_keys_of(runs)}")
    return found


def _compared(key: str, first: MeanInterval, second: MeanInterval, difference: float) -> Comparison:
    apart = independent_difference(second, first)
    told = difference * abs(first.mean)
    timed = first.step_s is not None and second.step_s is not None
    window_s = shortest_window(told, first, second) if told > 0 and timed else None
    return Comparison(key, first, second, apart, told, window_s)


def _keys_of(runs: Sequence[RunLog]) -> str:
    names = [{name for entry in run.entries for name in entry} for run in runs]
    return f"Keys of both: {', '.join(sorted(names[0] & names[1])) or 'none'}."


def _seconds(interval: MeanInterval) -> float:
    return interval.samples * (interval.step_s or 0.0)


def comparison_json(comparison: Comparison) -> dict[str, JsonValue]:
    """Return a comparison as plain JSON data, in the units of the log and in seconds."""
    more = comparison.more_seconds
    return {
        "key": comparison.key,
        "first": {**interval_json(comparison.first)},
        "second": {**interval_json(comparison.second)},
        "difference": {**interval_json(comparison.difference)},
        "higher": comparison.higher,
        "told_difference": comparison.told_difference,
        "window_seconds": comparison.window_s,
        "more_seconds": None if more is None else list(more),
    }


_NOTE = (
    "The intervals (95 %) are of the time within these two runs. Runs of one setting differ as well: repeat "
    "each to know by how much."
)


def comparison_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table with one row for each key, and a sentence for each."""
    rows = [
        (
            one.key,
            _figure(one.key, one.first),
            _figure(one.key, one.second),
            _apart(one.key, one.difference),
            _relative(one),
        )
        for one in comparisons
    ]
    table = text_table(("", "A", "B", "B - A", "of A"), rows, left=(0,)).splitlines()
    return [*table, "", *(f"{one.key}: {_verdict(one)}." for one in comparisons), _NOTE]


def _verdict(one: Comparison) -> str:
    if one.difference.half_width is None:
        sides = (("A", one.first), ("B", one.second))
        reasons = [f"{side}: {interval.reason}" for side, interval in sides if interval.reason]
        return f"cannot be compared; {'; '.join(reasons)}"
    if one.higher is not None:
        return f"{one.higher} is {'better' if one.key in _HIGHER_IS_BETTER else 'higher'}"
    said = "A and B cannot be told apart"
    more = one.more_seconds
    if more is None:
        return said
    size = f"a difference of {_plain(one.key, one.told_difference)}"
    if max(more) == 0:
        return f"{said}; {size} would most likely have been seen"
    waits = [
        f"{duration(seconds)} more of {side}" for side, seconds in zip("AB", more, strict=True) if seconds
    ]
    return f"{said}; {' and '.join(waits)} would tell {size}"


def _figure(key: str, interval: MeanInterval) -> str:
    if key in _SHARES:
        return interval.in_percent()
    return _in_one_unit(interval)


def _apart(key: str, difference: MeanInterval) -> str:
    if key in _SHARES:
        return difference.in_points()
    return f"{'+' if difference.mean >= 0 else ''}{_in_one_unit(difference)}"


def _in_one_unit(interval: MeanInterval) -> str:
    """Return "41.20K (± 0.15K)": in one unit, to the second digit of the interval."""
    mean = format_value(interval.mean, "si")
    half = interval.half_width
    if half is None:
        return mean
    largest = max(abs(interval.mean), half)
    unit = next((name for name, size in reversed(_UNITS.items()) if largest >= size), "")
    size = _UNITS.get(unit, 1.0)
    if half <= 0:
        return f"{mean} (± 0)"
    if largest < 1e-3:
        return f"{interval.mean:.3g} (± {half:.2g})"
    decimals = min(9, max(0, 1 - math.floor(math.log10(half / size))))
    return f"{interval.mean / size:.{decimals}f}{unit} (± {half / size:.{decimals}f}{unit})"


def _relative(one: Comparison) -> str:
    """Return the difference as a share of A, whose own error is in the difference already."""
    if one.first.mean == 0:
        return format_value(None)
    share = one.difference.scaled(100 / one.first.mean)
    mean = f"{share.mean:+.1f} %"
    return mean if share.half_width is None else f"{mean} ({plus_minus(abs(share.half_width))})"


def _plain(key: str, value: float) -> str:
    return f"{100 * value:.2g} points" if key in _SHARES else format_value(value, "si")
