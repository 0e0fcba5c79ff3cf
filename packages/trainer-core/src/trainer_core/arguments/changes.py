"""What it means that a run goes on with other arguments than it was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

from ..schedule_names import WITHOUT_TOTAL

REFUSED = frozenset({"seed", "seed_per_rank", "dataloader_shuffle", "dataloader_drop_last", "qat_recipe"})
"""The saved state has no meaning under another value: data order, generators, fake-quantized weights."""

WARNED = frozenset(
    {
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "max_grad_norm",
        "default_dtype",
        "mixed_precision",
        "fp8_recipe",
        "fp8_dim_alignment",
        "fp8_exclude",
        "fp8_emulate",
        "float32_matmul_precision",
        "label_smoothing",
        "z_loss",
        "nonfinite_policy",
    }
)
"""The curve goes on in another way than it would have."""

_STOPPING_POINTS = frozenset({"max_steps", "num_train_epochs"})
_WITHOUT_END = ("", *WITHOUT_TOTAL)


class Change(NamedTuple):
    """One argument that differs."""

    name: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.name}: {self.before!r} before, {self.now!r} now"


class Changes(NamedTuple):
    """The arguments that differ, by what that means; every other one is unchanged."""

    allowed: tuple[Change, ...]
    """Does not touch the curve: schedules of logs, evaluations and saves, memory, speed, places."""
    warned: tuple[Change, ...]
    refused: tuple[Change, ...]


def compare(before: Mapping[str, object], now: object, *, batch: tuple[object, object]) -> Changes:
    """Compare the arguments of a checkpoint with those of this start.

    Args:
        before: As `plain_arguments` gave them; arguments that it lacks did not exist then.
        now: The argument dataclass of this start.
        batch: Examples of an optimizer step over all ranks, before and now.

    Returns:
        The differences.
    """
    current = plain_arguments(now)
    allowed, warned, refused = [], [], []
    # Moving the end of a run changes the curve only if the schedule aims at the end.
    aims_at_end = current.get("lr_scheduler_type") not in _WITHOUT_END
    harmless = frozenset() if aims_at_end else _STOPPING_POINTS
    for name in sorted(current.keys() & before.keys()):
        if before[name] == current[name]:
            continue
        change = Change(name, before[name], current[name])
        if name in REFUSED:
            refused.append(change)
        elif name in WARNED - harmless:
            warned.append(change)
        else:
            allowed.append(change)
    if batch[0] != batch[1]:
        warned.append(Change("examples of an optimizer step, over all ranks", *batch))
    return Changes(tuple(allowed), tuple(warned), tuple(refused))


def plain_arguments(args: object) -> dict[str, object]:
    """The arguments as JSON values, by name; nested argument classes become tables."""
    return {field.name: _plain(getattr(args, field.name)) for field in fields(args)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain_arguments(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
