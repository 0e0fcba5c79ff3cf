"""Reads the log of a run, also after resumes, and summarizes it as a record, a table and JSON."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles

from ..display import format_value, text_table
from ..uncertainty import MeanInterval, interval_json, paired_difference
from .log_file import (
    LOG_FILENAME,
    STATE_FILENAME,
    JsonValue,
    LogEntry,
    find_log,
    is_final,
    is_training,
    load_logs,
)

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

    A run that resumes from a checkpoint does steps anew. Where training comes back to a step that it had
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


_MOST = 1e15
"""No figure of a training and no time in seconds is above it; sums of larger numbers overflow."""
PAUSE_SECONDS = 60.0
"""Unexplained time between two log entries that is noted as a pause."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a log says about a run; None where it does not say.

    Speeds and shares are taken over the log entries of the training steps, each counting the same, the first
    one with its warm-up included; the median is hardly moved by it.
    """

    name: str
    """The run's directory or file."""
    path: Path
    """The log, as it was given."""
    steps: int | None
    """The last step that is logged."""
    tokens: int | None
    """Tokens seen by then: `total_tokens`, or `num_input_tokens_seen` in a log of Hugging Face's trainer."""
    final_loss: float | None
    """The last training loss; nan if null was logged, which is how a loss that is not a number gets there."""
    final_loss_mean: float | None
    """Mean training loss over the last 10 % of the steps, weighted by `tokens` where these are logged."""
    best_eval_loss: float | None
    """The lowest `eval_loss`."""
    best_eval_step: int | None
    """The step of `best_eval_loss`."""
    tok_per_sec_median: float | None
    """Input tokens per second of net time."""
    tok_per_sec_p10: float | None
    """A tenth of the entries are slower."""
    tok_per_sec_p90: float | None
    """A tenth of the entries are faster."""
    mfu_median: float | None
    """Model FLOPs utilization as a share: 1.0 is the peak."""
    hfu_median: float | None
    """The same with recomputed FLOPs included."""
    peak_memory_bytes: int | None
    """The largest `peak_mem_allocated` of any rank."""
    data_wait_share: float | None
    """Share of the net time that was spent waiting for data."""
    wall_seconds: float | None
    """From the beginning of the first log interval to the last entry, evaluation, saving and pauses included.

    From the timestamps, and from `interval_seconds` where one is before the last, as of a clock that was set
    back; without them, the runtime that the final entry gives for the last session.
    """
    pauses: int | None
    """How often more than a minute lies between two entries that neither training nor evaluation explains:
    the run was stopped, or saved for long. None without timestamps and `interval_seconds`."""
    pause_seconds: float | None
    """Length of these pauses together; training whose entries were removed at a resume is part of it."""
    resumes: int | None
    """How often training came back to an earlier step. None if it never did, which tells nothing:
    `JsonLogger` removes the traces of that, and a run that continued from its last entry leaves none."""
    ofu: MeanInterval | None = None
    """Mean OFU over the time of `steady_entries`, with its confidence interval."""
    mfu_minus_ofu: MeanInterval | None = None
    """Mean of MFU - OFU over the same time, entry by entry, with its confidence interval."""


def summarize_log(path: str | Path) -> RunSummary:
    """Return the figures of a run from its log.

    Args:
        path: A log, or a directory that holds one; see `load_logs`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a log file.
    """
    return summary_of(read_run(path), default_names([Path(path)])[0])


def summary_of(run: RunLog, name: str) -> RunSummary:
    """Return the figures of a run that has been read."""
    speed = run.series("tok_per_sec").finite()
    p10, p90 = _tenth_and_ninetieth(speed)
    eval_loss, eval_step = _lowest(run.series("eval_loss"))
    losses = run.series("loss")
    memory = (run.series("peak_mem_allocated") or run.series("peak_mem")).finite()
    pauses = _pauses(run.written)
    return RunSummary(
        name=name,
        path=run.path,
        steps=int(max(map(step_of, run.entries))) if run.entries else None,
        tokens=_last_tokens(run),
        final_loss=losses.values[-1] if losses.values else None,
        final_loss_mean=_mean_of_last_tenth(run, losses),
        best_eval_loss=eval_loss,
        best_eval_step=eval_step,
        tok_per_sec_median=_median(speed),
        tok_per_sec_p10=p10,
        tok_per_sec_p90=p90,
        mfu_median=_median(run.series("mfu").finite()),
        hfu_median=_median(run.series("hfu").finite()),
        peak_memory_bytes=int(max(memory)) if memory else None,
        data_wait_share=_weighted_mean(run, "data_wait_share", "interval_seconds"),
        wall_seconds=_wall_seconds(run),
        pauses=None if pauses is None else len(pauses),
        pause_seconds=None if pauses is None else math.fsum(pauses),
        resumes=run.resumes_seen or None,
        ofu=interval_of(run, "ofu"),
        mfu_minus_ofu=interval_of(run, "mfu", minus="ofu"),
    )


def interval_of(
    run: RunLog, key: str, *, minus: str | None = None, after_step: float = 0.0
) -> MeanInterval | None:
    """Return the mean of a key over time, or of the difference of two, with its confidence interval.

    Over `steady_entries`, each counting by its `interval_seconds`, or all the same where one has none.

    Args:
        run: The log.
        key: Key of the entries.
        minus: Another key, which is subtracted entry by entry.
        after_step: Steps up to here are left out.

    Returns:
        None where no entry has the key.
    """
    rows = [
        (value, other, number_of(entry, "interval_seconds"), number_of(entry, "timestamp"))
        for entry in steady_entries(run, after_step)
        if (value := number_of(entry, key)) is not None
        and (other := 0.0 if minus is None else number_of(entry, minus)) is not None
        and max(abs(value), abs(other)) < _MOST
    ]
    if not rows:
        return None
    values, others, seconds, times = zip(*rows, strict=True)
    weights = [one for one in seconds if one is not None and 0 < one < _MOST]
    if len(weights) == len(rows):
        return paired_difference(values, others, weights=weights, step_s=fmean(weights))
    told = [time for time in times if time is not None]
    gaps = [later - earlier for earlier, later in pairwise(told) if later > earlier]
    return paired_difference(values, others, step_s=median(gaps) if gaps else None)


def steady_entries(run: RunLog, after_step: float = 0.0) -> list[LogEntry]:
    """Return the entries of training intervals without warm-up.

    The first entry of the run, and the first after each resume or pause that the log tells, have compilation,
    loading and caches in them, and are left out.
    """
    first: list[LogEntry] = []
    last, pauses = -math.inf, {id(entry) for entry, _ in _unexplained(run.written) or ()}
    for entry in run.written:
        if is_training(entry):
            if not first or step_of(entry) <= last or id(entry) in pauses:
                first.append(entry)
            last = step_of(entry)
    warming = {id(entry) for entry in first}
    return [
        entry
        for entry in run.entries
        if is_training(entry) and id(entry) not in warming and step_of(entry) > after_step
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _tenth_and_ninetieth(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def _lowest(series: Series) -> tuple[float | None, int | None]:
    points = [
        (value, step) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)
    ]
    value, step = min(points, default=(None, None))
    return value, None if step is None else int(step)


def _last_tokens(run: RunLog) -> int | None:
    for key in TOKEN_KEYS:
        counts = run.series(key).finite()
        if counts:
            return int(counts[-1])
    return None


def _mean_of_last_tenth(run: RunLog, losses: Series) -> float | None:
    if not losses.steps:
        return None
    # An entry stands for the steps up to its own, so that of 0.9 belongs to those before.
    begin = 0.9 * losses.steps[-1]
    last = [(step, value) for step, value in zip(losses.steps, losses.values, strict=True) if step > begin]
    tokens = run.series("tokens")
    by_step = dict(zip(tokens.steps, tokens.values, strict=True))
    weights = [by_step.get(step, math.nan) for step, _ in last]
    values = [value for _, value in last]
    return fmean(values, weights if all(weight > 0 for weight in weights) else None)


def _weighted_mean(run: RunLog, key: str, weight_key: str) -> float | None:
    found = [
        (value, number_of(entry, weight_key))
        for entry in run.entries
        if (value := number_of(entry, key)) is not None
    ]
    if not found:
        return None
    weights = [weight for _, weight in found if weight is not None and weight > 0]
    return fmean([value for value, _ in found], weights if len(weights) == len(found) else None)


def _wall_seconds(run: RunLog) -> float | None:
    times = _numbers(run, "timestamp")
    if len(times) > 1 and math.isfinite(max(times) - min(times)):
        timed = [entry for entry in run.written if number_of(entry, "timestamp") is not None]
        # Where the clock was set back, what was measured takes the place of what it tells.
        begins = [run.written[0], *(timed[n] for n in range(1, len(timed)) if times[n] < times[n - 1])]
        told = math.fsum(max(0.0, later - earlier) for earlier, later in pairwise(times))
        return told + math.fsum(number_of(entry, "interval_seconds") or 0.0 for entry in begins)
    runtimes = _numbers(run, "train_runtime_gross", "train_runtime")
    return runtimes[-1] if runtimes else None


def _numbers(run: RunLog, *keys: str) -> list[float]:
    return [number for entry in run.written if (number := number_of(entry, *keys)) is not None]


def _pauses(written: Sequence[LogEntry]) -> list[float] | None:
    """Return the lengths of pauses between the training entries, or None if times are missing."""
    pauses = _unexplained(written)
    return None if pauses is None else [seconds for _, seconds in pauses]


def _unexplained(written: Sequence[LogEntry]) -> list[tuple[LogEntry, float]] | None:
    """Return the entries before which there was a pause, and its seconds; None if times are missing."""
    pauses: list[tuple[LogEntry, float]] = []
    last: float | None = None
    told = False
    evaluating = 0.0
    for entry in written:
        evaluating += number_of(entry, "eval_seconds", "eval_runtime") or 0.0
        if not is_training(entry):
            continue
        time, interval = number_of(entry, "timestamp"), number_of(entry, "interval_seconds")
        if time is None or interval is None:
            return None
        if last is not None:
            told = True
            unexplained = time - last - interval - evaluating
            if PAUSE_SECONDS < unexplained < math.inf:
                pauses.append((entry, unexplained))
        last, evaluating = time, 0.0
    return pauses if told else None


def summary_lines(summaries: Sequence[RunSummary]) -> list[str]:
    """Return a table with one row for each run; figures that a log does not tell are "n/a".

    Below it stand the runs whose OFU has no interval, with the reason.
    """
    rows = [_cells(summary, with_ofu=any(one.ofu is not None for one in summaries)) for summary in summaries]
    table = text_table(list(rows[0]), [list(row.values()) for row in rows]).splitlines() if rows else []
    lacking = [
        f"{run.name}: OFU has no interval, as {run.ofu.reason}"
        for run in summaries
        if run.ofu is not None and run.ofu.reason is not None
    ]
    return [*table, *lacking]


def summary_json(summary: RunSummary) -> dict[str, JsonValue]:
    """Return a summary as plain JSON data, with null for what is missing or no number."""
    told = {one.name: _plain(getattr(summary, one.name)) for one in fields(summary)}
    for name in ("ofu", "mfu_minus_ofu"):
        interval: MeanInterval | None = getattr(summary, name)
        told[name] = None if interval is None else {**interval_json(interval)}
    return told


def _cells(run: RunSummary, *, with_ofu: bool) -> dict[str, str]:
    best = format_value(run.best_eval_loss, ".4f")
    pauses = format_value(run.pauses, "d")
    # Few runs have counters; the table is wide enough without them.
    ofu = {
        "OFU": format_value(None) if run.ofu is None else run.ofu.in_percent(),
        "MFU-OFU": format_value(None) if run.mfu_minus_ofu is None else run.mfu_minus_ofu.in_points(),
    }
    return {
        "run": run.name,
        "steps": format_value(run.steps, ",d"),
        "tokens": format_value(run.tokens, "si"),
        "loss": format_value(run.final_loss, ".4f"),
        "last 10%": format_value(run.final_loss_mean, ".4f"),
        "best eval": best if run.best_eval_step is None else f"{best} @ {run.best_eval_step:,}",
        "tok/s": format_value(run.tok_per_sec_median, "si"),
        "p10": format_value(run.tok_per_sec_p10, "si"),
        "p90": format_value(run.tok_per_sec_p90, "si"),
        "MFU": format_value(run.mfu_median, ".1%"),
        "HFU": format_value(run.hfu_median, ".1%"),
        **(ofu if with_ofu else {}),
        "peak memory": format_value(run.peak_memory_bytes, "gib"),
        "data wait": format_value(run.data_wait_share, ".1%"),
        "wall": duration(run.wall_seconds),
        "pauses": f"{pauses} of {duration(run.pause_seconds)}" if run.pauses else pauses,
        "resumes": format_value(run.resumes, "d"),
    }


def duration(seconds: float | None) -> str:
    """Return a time in its two largest units: 12.3s, 4m37s, 1h02m, 2d03h."""
    if seconds is None:
        return format_value(None)
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _plain(value: object) -> JsonValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else str(value)
