"""The figures of a run in one record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles

from ..records import is_training
from .log_entry import LogEntry
from .run_log import TOKEN_KEYS, RunLog, Series, default_names, number_of, read_run, step_of

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
    """The last training loss; nan if null was logged, which is how a loss that is no number gets there."""
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

    From the timestamps; without them, the runtime that the final entry gives for the last session.
    """
    pauses: int | None
    """How often more than a minute lies between two entries that neither training nor evaluation explains:
    the run was stopped, or saved for long. None without timestamps and `interval_seconds`."""
    pause_seconds: float | None
    """Length of these pauses together; training whose entries were removed at a resume is part of it."""
    resumes: int | None
    """How often training came back to an earlier step. None if it never did, which tells nothing:
    `JsonLogger` removes the traces of that, and a run that went on from its last entry leaves none."""


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
    )


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
    times = [time for entry in run.written if (time := number_of(entry, "timestamp")) is not None]
    if len(times) > 1 and math.isfinite(max(times) - min(times)):
        return max(times) - min(times) + (number_of(run.written[0], "interval_seconds") or 0.0)
    runtimes = [
        time
        for entry in run.written
        if (time := number_of(entry, "train_runtime_gross", "train_runtime")) is not None
    ]
    return runtimes[-1] if runtimes else None


def _pauses(written: Sequence[LogEntry]) -> list[float] | None:
    """Return the lengths of pauses between the training entries, or None if times are missing."""
    pauses: list[float] = []
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
                pauses.append(unexplained)
        last, evaluating = time, 0.0
    return pauses if told else None
