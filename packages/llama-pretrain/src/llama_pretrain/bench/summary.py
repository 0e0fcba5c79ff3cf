"""From trials to figures and tables: speed, memory, and whether all did the same work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_metrics import model_flops_utilization

from ..commands.arguments import BenchArguments
from ..console import table
from .baselines import BASELINES, REFERENCE
from .trial import Trial

_IBM = "IBM and Meta on pretraining with FSDP, 2024"
_IBM_README = "fms-fsdp, README, 2024"
_TITAN_A100 = "torchtitan, docs/performance.md, 2024"
_TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_H200 = "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md, by Trainy"


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        size: The preset that is nearest to its model.
        source: Who says so, where.
        model: The model.
        device: The GPUs, and their number.
        how: Parallelism, precision and the like.
        tokens_per_second: Per GPU.
        mfu: As a share, by the source's own count; None if it tells none for this figure.
    """

    size: str
    source: str
    model: str
    device: str
    how: str
    tokens_per_second: float
    mfu: float | None


def _ibm(size: str, how: str, a100: tuple[float, float], h100: tuple[float, float]) -> tuple[Published, ...]:
    model, told = f"Llama 2 {size}, 4096 tokens", f"FSDP, bf16, {how}"
    return (
        Published(size, _IBM, model, "128 A100 80GB", told, *a100),
        Published(size, _IBM, model, "96 H100 80GB", told, *h100),
    )


def _ibm_compiled(size: str, a100: float, h100: float) -> tuple[Published, ...]:
    model, told = f"Llama 2 {size}, 4096 tokens", "FSDP, bf16, compiled"
    return (
        Published(size, _IBM_README, model, "A100 80GB", told, a100, None),
        Published(size, _IBM_README, model, "H100 80GB", told, h100, None),
    )


def _titan_a100(size: str, model: str, how: str, tokens: float, mfu: float) -> Published:
    return Published(size, _TITAN_A100, model, "64 A100 80GB", f"FSDP2, bf16, {how}", tokens, mfu)


def _titan_h100(how: str, tokens: float) -> Published:
    device = "8 H100 96GB HBM2e, 500 W"
    told = f"FSDP2, operators checkpointed, {how}"
    return Published("7b", _TITAN_H100, "Llama 3.1 8B, batch 2", device, told, tokens, None)


_ROWS = (
    *_ibm("7b", "no checkpointing", (3700, 0.57), (7500, 0.37)),
    *_ibm_compiled("7b", 4550, 9600),
    _titan_a100("7b", "Llama 3 8B, batch 1", "layers checkpointed", 2904, 0.568),
    _titan_a100("7b", "Llama 3 8B, batch 1", "operators checkpointed", 2973, 0.582),
    _titan_h100("bf16", 5762),
    _titan_h100("bf16, compiled", 6667),
    _titan_h100("float8, compiled", 8532),
    Published(
        "7b",
        _TITAN_H200,
        "Llama 3.1 8B, batch 2",
        "32 H200",
        "FSDP2, float8, compiled",
        10938,
        None,
    ),
    *_ibm("13b", "selective checkpointing", (1800, 0.51), (3800, 0.35)),
    *_ibm_compiled("13b", 2150, 4850),
    _titan_a100("13b", "Llama 2 13B, batch 2", "no checkpointing", 2162, 0.611),
    _titan_a100("13b", "Llama 2 13B, batch 2", "layers checkpointed", 1914, 0.541),
    *_ibm("34b", "full checkpointing", (700, 0.47), (1550, 0.32)),
    *_ibm_compiled("34b", 820, 1830),
    *_ibm("70b", "full checkpointing", (370, 0.50), (800, 0.34)),
    *_ibm_compiled("70b", 410, 890),
    _titan_a100("70b", "Llama 2 70B, batch 2", "full checkpointing", 353, 0.505),
    _titan_a100("70b", "Llama 3 70B, batch 1", "full checkpointing", 331, 0.517),
)


def published(model: str) -> list[Published]:
    """Return the figures for models of the size of a preset; those for 7b if there are none."""
    sizes = {row.size for row in _ROWS}
    return [row for row in _ROWS if row.size == (model if model in sizes else "7b")]


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
