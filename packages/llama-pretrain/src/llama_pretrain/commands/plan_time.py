"""How long a planned run takes and what it costs: from the FLOPs of its model, the GPU's peak and an MFU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import torch

from hardware_table import accelerators, lookup
from perf_metrics import load_logs, model_flops_per_token
from trainer_core import ConfigurationError

from ..model.config import LlamaConfig
from ..model.llama import Llama
from .arguments import PlanArguments

ASSUMED_MFU = (0.3, 0.5)
"""What is assumed of a run that nothing is known of. Published runs of dense models of 7B to 70B under FSDP
have 0.32 to 0.45 on H100s and 0.47 to 0.68 on A100s ("Maximizing training throughput using PyTorch FSDP",
pytorch.org, 2024); much communication between nodes, or small models, have less."""
FP8 = "fp8"
_DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """Speed, time and cost of a run, each as the two ends of a range."""

    gpu: str
    count: int
    dtype: str
    """Type of the matrix products, which decides the peak."""
    peak_flops: float
    """Dense FLOP/s of one GPU."""
    flops_per_token: float
    """Model FLOPs of a training step; recomputation is not among them, as in MFU."""
    mfu: tuple[float, float]
    """Lowest and highest, as shares."""
    origin: str
    """Where it is from."""
    tokens: float | None
    """Tokens of the run."""
    price: float | None
    """Of one GPU hour."""

    @property
    def tokens_per_day(self) -> tuple[float, float]:
        """Tokens that all GPUs train on in a day, of steps alone."""
        least, most = (self.count * self.peak_flops * mfu / self.flops_per_token for mfu in self.mfu)
        return least * _DAY, most * _DAY

    @property
    def days(self) -> tuple[float, float] | None:
        """Days for all tokens, the shorter time first."""
        if self.tokens is None:
            return None
        least, most = self.tokens_per_day
        return self.tokens / most, self.tokens / least

    @property
    def gpu_hours(self) -> tuple[float, float] | None:
        """Hours times GPUs for all tokens."""
        return None if self.days is None else (self.days[0] * 24 * self.count, self.days[1] * 24 * self.count)

    @property
    def cost(self) -> tuple[float, float] | None:
        """What they cost, in the currency of `price`."""
        if self.price is None or self.gpu_hours is None:
            return None
        return self.gpu_hours[0] * self.price, self.gpu_hours[1] * self.price

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        peak, flops = f"{self.peak_flops / 1e12:,.1f} TFLOP/s", f"{self.flops_per_token / 1e9:,.3g} GFLOPs"
        mfu = f"MFU {_range(self.mfu, '.0%')} ({self.origin})"
        yield f"{self.count} x {self.gpu}, {peak} {self.dtype} each; {flops} per token; {mfu}"
        least, most = self.tokens_per_day
        yield f"tokens per day: {_range((least / 1e9, most / 1e9), ',.3g')} billion"
        if self.tokens is None or self.days is None or self.gpu_hours is None:
            return
        cost = "" if self.cost is None else f", which cost {_figures(self.cost)}"
        hours = (self.days[0] * 24, self.days[1] * 24)
        time = f"{_figures(self.days)} days" if self.days[1] >= 1 else f"{_figures(hours)} hours"
        yield f"{self.tokens / 1e9:,.4g} billion tokens: {time}, {_figures(self.gpu_hours)} GPU hours{cost}"
        yield "Evaluation, saving and restarts come on top; `perf-metrics goodput` tells them of a run."

    def to_json(self) -> dict[str, object]:
        """All figures as plain values; ranges as lists of two."""
        ranges = {name: getattr(self, name) for name in ("tokens_per_day", "days", "gpu_hours", "cost")}
        return {**vars(self), **{name: None if each is None else list(each) for name, each in ranges.items()}}


def _figures(ends: tuple[float, float]) -> str:
    """A range of small or large numbers, in three digits or whole."""
    return _range(ends, ",.0f" if ends[0] >= 100 else ".3g")


def _range(ends: tuple[float, float], fmt: str) -> str:
    one, other = (format(end, fmt) for end in ends)
    return one if one == other else f"{one} to {other}"


def time_plan(
    asked: PlanArguments, config: LlamaConfig, *, count: int, dtype: str, tokens: float | None = None
) -> TimePlan | None:
    """Plan the time of a run; None if no GPU was named.

    Args:
        asked: The GPU, the MFU, the tokens and the price; and the length of rows.
        config: Shape of the model.
        count: Number of GPUs.
        dtype: Type of the matrix products, as the peak tables name it; "fp8" where only some are in it.
        tokens: Of the run, where `asked` does not say.

    Raises:
        ConfigurationError: If something is asked without a GPU, its peak is not known, or a figure is wrong.
    """
    for name in ("mfu", "tokens", "price"):
        if not asked.gpu and getattr(asked, name) not in ("", None):
            raise ConfigurationError(
                name,
                getattr(asked, name),
                "is about the time of a run on a GPU, which is not named",
                "give --gpu",
            )
    for name in ("tokens", "price"):
        value = getattr(asked, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigurationError(name, value, "must be 0 or more", "give a number such as 1e12")
    if not asked.gpu:
        return None
    if dtype == FP8:
        raise ConfigurationError(
            "gpu",
            asked.gpu,
            "is used in float8 and in other types, whose shares are known when the model has been converted",
            "leave --gpu out, or plan the run without fp8_recipe",
        )
    mfu, origin = _mfu(asked.mfu)
    with torch.device("meta"):
        flops = model_flops_per_token(Llama(config), asked.sequence_length)
    assert flops is not None  # our own model tells them
    return TimePlan(
        gpu=asked.gpu,
        count=count,
        dtype=dtype,
        peak_flops=_peak(asked.gpu, dtype),
        flops_per_token=flops,
        mfu=mfu,
        origin=origin,
        tokens=asked.tokens if asked.tokens is not None else tokens,
        price=asked.price,
    )


def _peak(gpu: str, dtype: str) -> float:
    record = lookup(gpu)
    if record is None:
        like = [each.name for each in accelerators() if gpu.strip().casefold() in each.name.casefold()]
        names = ", ".join(like[:6]) or "see `hardware-table list`"
        raise ConfigurationError(
            "gpu", gpu, "is not the name of one GPU, as torch reports it", f"use: {names}"
        )
    peak = record.peak_flops(dtype)
    if peak is None:
        raise ConfigurationError("gpu", gpu, f"has no known {dtype} peak", "choose another precision or GPU")
    return peak


def _mfu(text: str) -> tuple[tuple[float, float], str]:
    """The ends of a range, and where they are from."""
    if not text:
        return ASSUMED_MFU, "assumed"
    ends = [_share(part) for part in text.split("-")] if len(text.split("-")) <= 2 else [None]
    if None not in ends:
        least, most = min(filter(None, ends)), max(filter(None, ends))
        return (least, most), "given"
    if not Path(text).exists():
        raise ConfigurationError(
            "mfu", text, "is neither a share above 0, up to 1, nor a run", "use 0.4, 35%-45% or a directory"
        )
    try:
        entries = load_logs(text)
    except ValueError as error:
        raise ConfigurationError(
            "mfu", text, f"cannot be read: {error}", "name a run, or give a share"
        ) from error
    found = [value for entry in entries if "loss" in entry and isinstance(value := entry.get("mfu"), float)]
    if not found:
        raise ConfigurationError("mfu", text, "has logged no MFU", "name a run on a device with a known peak")
    # The first entry has the warm-up in it.
    found = found[1:] or found
    cuts = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
    return (cuts[0], cuts[-1]), f"measured in {text}, of 80 % of its log entries"


def _share(text: str) -> float | None:
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
