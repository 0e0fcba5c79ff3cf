"""From trials to figures and tables: speed, memory, and whether all did the same work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_metrics import model_flops_utilization

from ..commands.arguments import BenchArguments
from ..output import table
from .baselines import BASELINES, REFERENCE
from .published import Published
from .trial import Trial

TOLERANCE = {"no": 0.001, "bf16": 0.01}
"""By precision, the most that what a baseline has learned may deviate, as a share. Kernels and the order of
roundings differ. A learning rate that was off by a tenth showed as 0.006 to 0.09, no clipping as 0.003."""


@dataclass(frozen=True)
class Agreement:
    """How far baselines are from one of them.

    Attributes:
        beside: The baseline that the others are compared with.
        deviations: By name: difference of the losses after all steps, as a share of what `beside` has
            learned; the largest of all rounds.
        tolerance: The most that is the same work.
    """

    beside: str
    deviations: Mapping[str, float]
    tolerance: float

    def other_work(self) -> list[str]:
        """Names of those that did other work."""
        return [name for name, deviation in self.deviations.items() if not deviation <= self.tolerance]


def agreement(trials: Mapping[str, Sequence[Trial]], mixed_precision: str) -> Agreement | None:
    """Compare all baselines with the plain loop, or with the first one if that took no part.

    Returns:
        None if there are fewer than two.
    """
    if len(trials) < 2:
        return None
    beside = REFERENCE if REFERENCE in trials else next(iter(trials))
    reference = trials[beside][0]
    deviations = {
        name: max(_deviation(trial, reference) for trial in theirs) for name, theirs in trials.items()
    }
    return Agreement(beside, deviations, TOLERANCE[mixed_precision])


def _deviation(trial: Trial, reference: Trial) -> float:
    learned = reference.loss_before - reference.loss_after
    apart = abs(trial.loss_after - reference.loss_after) + abs(trial.loss_before - reference.loss_before)
    if math.isnan(apart):
        return math.inf
    return apart / abs(learned) if learned else (math.inf if apart else 0.0)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value or more."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one baseline.

    Attributes:
        step_ms: Milliseconds of a step; of the windows of all rounds, like all spreads but the last one.
        cpu_ms: Milliseconds of processor time of a step, which other work on the machine changes less.
        tokens_per_second: Tokens of all rows over seconds.
        mfu: Model FLOPs over what the device could have done, as a share; None where its peak is unknown.
        peak_memory_bytes: Highest of the rounds; None where it cannot be told.
        over_torch: Tokens per second over those of the plain torch loop in the same round, each the median of
            its windows; None if that took no part.
    """

    step_ms: Spread
    cpu_ms: Spread
    tokens_per_second: Spread
    mfu: Spread | None
    peak_memory_bytes: int | None
    over_torch: Spread | None


def summarise(trials: Mapping[str, Sequence[Trial]], args: BenchArguments) -> dict[str, Summary]:
    """Return the figures by name of the baseline."""
    beside = trials.get(REFERENCE)
    return {name: _summary(theirs, beside, args) for name, theirs in trials.items()}


def _summary(trials: Sequence[Trial], beside: Sequence[Trial] | None, args: BenchArguments) -> Summary:
    tokens = args.per_device_train_batch_size * args.sequence_length
    memory = [trial.peak_memory_bytes for trial in trials if trial.peak_memory_bytes is not None]
    windows = [window for trial in trials for window in trial.windows]
    used = [share for window in windows if (share := _mfu(trials[0], tokens, window.wall_s)) is not None]
    over = None
    if beside is not None:
        over = Spread.of([plain.step_s / trial.step_s for trial, plain in zip(trials, beside, strict=True)])
    return Summary(
        step_ms=Spread.of([window.wall_s * 1e3 for window in windows]),
        cpu_ms=Spread.of([window.cpu_s * 1e3 for window in windows]),
        tokens_per_second=Spread.of([tokens / window.wall_s for window in windows]),
        mfu=Spread.of(used) if used else None,
        peak_memory_bytes=max(memory) if memory else None,
        over_torch=over,
    )


def _mfu(trial: Trial, tokens: int, seconds: float) -> float | None:
    if trial.flops_per_token is None:
        return None
    return model_flops_utilization(trial.flops_per_token * tokens, seconds, trial.peak_flops)


_HEADING = (
    "measured here",
    "tokens/s",
    "step ms (low to high)",
    "CPU ms",
    "MFU",
    "peak memory",
    "speed over torch",
)
_PUBLISHED = ("published", "on", "how", "tokens/s per GPU", "MFU", "source")


def measured_table(summaries: Mapping[str, Summary], failures: Mapping[str, str]) -> str:
    """Return a row for each baseline; one that failed has none, but its reason below."""
    rows = [_HEADING, *(_row(name, summary) for name, summary in summaries.items())]
    reasons = [f"{BASELINES[name].label} failed: {reason}" for name, reason in failures.items()]
    return "\n".join([*table(rows, right=range(1, len(_HEADING)), line=True), *reasons])


def published_table(rows: Sequence[Published]) -> str:
    """Return a row for each published figure, each marked as such."""
    cells = [
        (row.model, row.device, row.how, f"{row.tokens_per_second:,.0f}", _share(row.mfu), row.source)
        for row in rows
    ]
    return "\n".join(table([_PUBLISHED, *cells], right=(3, 4), line=True))


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    step, over = summary.step_ms, summary.over_torch
    return (
        BASELINES[name].label,
        f"{summary.tokens_per_second.median:,.0f}",
        f"{step.median:.1f} ({step.low:.1f} to {step.high:.1f})",
        f"{summary.cpu_ms.median:.1f}",
        _share(summary.mfu.median if summary.mfu else None),
        "n/a" if summary.peak_memory_bytes is None else f"{summary.peak_memory_bytes / 2**20:,.0f} MiB",
        "n/a" if over is None else _ratio(over),
    )


def _ratio(over: Spread) -> str:
    return f"{over.median:.3f} ({over.low:.3f} to {over.high:.3f})"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"
