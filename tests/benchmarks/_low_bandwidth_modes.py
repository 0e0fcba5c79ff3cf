"""The modes that the low-bandwidth study compares, and how each one is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from trainer_ddp import CompressionArguments, DiLoCoArguments, PostLocalSGDArguments

Settings = CompressionArguments | PostLocalSGDArguments | DiLoCoArguments
BASE = "ddp"
"""The mode that the others are compared with."""
WARM_UP_SHARE = 0.1
"""Of the steps: ordinary training before a mode begins. The cosine schedule has warmed up by then."""
OUTER_LEARNING_RATE = 0.7
"""Of DiLoCo: that of Douillard et al. 2023, arXiv 2311.08105, section 3."""
LONG_MOMENTUM = 0.9
"""Of the outer optimizer in the same paper. It makes 0.7 / (1 - 0.9) = 7 times the way of a lasting move."""
SHORT_MOMENTUM = 0.5
"""1.4 times the way, for runs of a few dozen outer steps; what 0.9 makes of such a run is a row too."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One row of the table."""

    label: str
    told: str
    """What sets it apart, in words."""
    settings: Mapping[str, Settings] = field(default_factory=dict)
    """By name of the group in `DDPTrainingArguments`."""
    warm_up: int = 0
    """Steps of ordinary training before it begins."""
    seed_offset: int = 0
    """Added to the seed of the initial weights; not to that of the data."""

    def as_json(self) -> dict[str, object]:
        """The settings as plain values."""
        return {name: asdict(group) for name, group in self.settings.items()}


def modes(steps: int) -> dict[str, Mode]:
    """Every mode by its short name, for runs of so many steps."""
    start = round(steps * WARM_UP_SHARE)
    found = {
        BASE: Mode(label="DDP", told="fp32 gradients"),
        "ddp-other": Mode(label="DDP", told="other initial weights", seed_offset=1),
        "fp16": _rounded("fp16"),
        "bf16": _rounded("bf16"),
        "powersgd": _power_sgd(4, start),
        "powersgd-16": _power_sgd(16, start),
    }
    for period in (8, 32):
        found[f"post-local-{period}"] = _post_local(period, start)
    for inner in (20, 50, 100):
        found[f"diloco-{inner}"] = _diloco(inner, start, SHORT_MOMENTUM)
    found["diloco-20-long"] = _diloco(20, start, LONG_MOMENTUM)
    # What averaging is good for: the same without any, but for the one at the end.
    found["apart"] = replace(_post_local(steps - start, start), told="once, at the end")
    return found


def _rounded(method: str) -> Mode:
    return Mode(
        label="DDP",
        told=f"{method} gradients",
        settings={"compression": CompressionArguments(method=method)},
    )


def _power_sgd(rank: int, start: int) -> Mode:
    settings = CompressionArguments(method="powerSGD", matrix_rank=rank, start_step=start)
    return Mode(
        label="powerSGD",
        told=f"rank {rank}",
        settings={"compression": settings},
        warm_up=start,
    )


def _post_local(period: int, start: int) -> Mode:
    settings = PostLocalSGDArguments(
        enabled=True,
        start_step=start,
        period=period,
        # All ranks are on one host here, and would average every gradient.
        post_local_gradient_allreduce=False,
    )
    return Mode(
        label="PostLocalSGD",
        told=f"period {period}",
        settings={"post_local_sgd": settings},
        warm_up=start,
    )


def _diloco(inner: int, start: int, momentum: float) -> Mode:
    settings = DiLoCoArguments(
        enabled=True,
        start_step=start,
        inner_steps=inner,
        outer_learning_rate=OUTER_LEARNING_RATE,
        outer_momentum=momentum,
    )
    return Mode(
        label="DiLoCo",
        told=f"{inner} inner steps, momentum {momentum}",
        settings={"diloco": settings},
        warm_up=start,
    )
