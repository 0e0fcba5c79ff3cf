"""From turns to the figures of each contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_metrics import model_flops_utilization

from .contenders import BASELINE
from .options import BenchArguments
from .turn import Turn


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
    """Figures of one contender.

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


def summarise(turns: Mapping[str, Sequence[Turn]], args: BenchArguments) -> dict[str, Summary]:
    """Return the figures by name of the contender."""
    beside = turns.get(BASELINE)
    return {name: _summary(theirs, beside, args) for name, theirs in turns.items()}


def _summary(turns: Sequence[Turn], beside: Sequence[Turn] | None, args: BenchArguments) -> Summary:
    tokens = args.per_device_train_batch_size * args.sequence_length
    memory = [turn.peak_memory_bytes for turn in turns if turn.peak_memory_bytes is not None]
    windows = [window for turn in turns for window in turn.windows]
    used = [share for window in windows if (share := _mfu(turns[0], tokens, window.wall_s)) is not None]
    over = None
    if beside is not None:
        over = Spread.of([plain.step_s / turn.step_s for turn, plain in zip(turns, beside, strict=True)])
    return Summary(
        step_ms=Spread.of([window.wall_s * 1e3 for window in windows]),
        cpu_ms=Spread.of([window.cpu_s * 1e3 for window in windows]),
        tokens_per_second=Spread.of([tokens / window.wall_s for window in windows]),
        mfu=Spread.of(used) if used else None,
        peak_memory_bytes=max(memory) if memory else None,
        over_torch=over,
    )


def _mfu(turn: Turn, tokens: int, seconds: float) -> float | None:
    if turn.flops_per_token is None:
        return None
    return model_flops_utilization(turn.flops_per_token * tokens, seconds, turn.peak_flops)
