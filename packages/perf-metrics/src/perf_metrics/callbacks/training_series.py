"""The series that a training job serves to Prometheus, and which entry of a log record each is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Series:
    """One series.

    Attributes:
        name: Its name; that of a counter ends in `_total`.
        text: What it is, with its unit.
        kind: A counter only grows.
    """

    name: str
    text: str
    kind: Literal["gauge", "counter"] = "gauge"


Figures: TypeAlias = dict[Series, float]
"""What is known; a series that is not in it is not served."""

STEP = Series("training_step", "Optimizer steps done since the very beginning.")
TOKENS = Series(
    "training_tokens_total", "Input tokens since the training began here, over all ranks.", "counter"
)
LOGGED_AT = Series("training_last_record_timestamp_seconds", "Unix time of the last record of an interval.")
MFU = Series("training_mfu_ratio", "Model FLOPs utilization in the last log interval, as a share.")
MEMORY = Series(
    "training_peak_memory_bytes",
    "Most bytes in tensors at one time, in the last log interval, on the rank with the most.",
)

_OF_AN_INTERVAL = {
    "loss": Series("training_loss", "Loss of the last log interval."),
    "grad_norm": Series("training_grad_norm", "Norm of the gradient."),
    "learning_rate": Series("training_learning_rate", "Learning rate."),
    "tok_per_sec": Series(
        "training_tokens_per_second", "Input tokens per second of net time, over all ranks."
    ),
    "mfu": MFU,
    "hfu": Series("training_hfu_ratio", "The same with what is recomputed, as a share."),
    "ofu": Series(
        "training_ofu_ratio", "Utilization by the hardware's counters, over all ranks, as a share."
    ),
}
_OF_AN_EVALUATION = {"eval_loss": Series("training_evaluation_loss", "Loss of the last evaluation.")}


def figures_of_interval(record: Mapping[str, object]) -> Figures:
    """Return what the record of an interval tells."""
    memory = _largest(record.get("peak_mem_allocated"))
    return _figures(record, _OF_AN_INTERVAL) | ({} if memory is None else {MEMORY: memory})


def figures_of_evaluation(record: Mapping[str, object]) -> Figures:
    """Return what the record of an evaluation tells."""
    return _figures(record, _OF_AN_EVALUATION)


def number(value: object) -> float | None:
    """Return a number, also out of an array without dimensions; None for what is none, such as a list."""
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    plain = tolist() if callable(tolist) else value
    return float(plain) if isinstance(plain, int | float) else None


def _figures(record: Mapping[str, object], wanted: Mapping[str, Series]) -> Figures:
    found = {series: number(record.get(entry)) for entry, series in wanted.items()}
    return {series: value for series, value in found.items() if value is not None}


def _largest(ranks: object) -> float | None:
    values = [number(value) for value in (ranks if isinstance(ranks, list | tuple) else [ranks])]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
