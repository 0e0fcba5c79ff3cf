"""The options that an optimizer was built with, and what a resume does with changed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..optimization import OptimizerFacade
from ..optimization.schedules import FactorSchedule

Options = dict[str, object]
# Positions and names; how a step is computed; the rate of this moment, which `initial_lr` stands for; and
# what schedulefree counts in its groups.
_LEFT_OUT = frozenset(
    {
        "params",
        "param_names",
        "lr",
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "decoupled_weight_decay",
        "k",
        "lr_max",
        "scheduled_lr",
        "train_mode",
        "weight_sum",
    }
)


class Hyperparameters:
    """Tells options that the user has changed since a checkpoint from those that changed in the run.

    A checkpoint holds the options of its moment, which a schedule or a callback may have moved; they are
    restored. Options that the optimizer was built with differently are the user's wish, and win.

    Args:
        optimizer: Just built, with its schedule.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_options(group) for group in optimizer.param_groups]

    def plain(self) -> list[Options]:
        """The options that the optimizer was built with, as JSON values, for a checkpoint."""
        return [{name: _plain(value) for name, value in options.items()} for options in self._built]

    def changes(self, before: Sequence[Mapping[str, object]]) -> list[str]:
        """Say what differs from the options that a checkpoint's optimizer was built with.

        Args:
            before: What `plain` gave then.
        """
        now = self.plain()
        if len(before) != len(now):
            return [f"{len(before)} optimizer groups before, {len(now)} now"]
        return [
            f"{name} of optimizer group {number}: {old.get(name)!r} before, {new.get(name)!r} now"
            for number, (old, new, names) in enumerate(zip(before, now, self._changed(before), strict=True))
            for name in sorted(names)
        ]

    @property
    def kind(self) -> str:
        """What holds the state: the class of the optimizer, or the classes of several."""
        return _kind(self._optimizer)

    def complete(self) -> None:
        """Give the groups their `initial_lr` again, which a checkpoint without a schedule does not have."""
        for group, built in zip(self._optimizer.param_groups, self._built, strict=True):
            group.setdefault("initial_lr", built["initial_lr"])

    def rates_as_built(self) -> None:
        """Put the learning rates back to those that the optimizer was built with."""
        for group, built in zip(self._optimizer.param_groups, self._built, strict=True):
            group["lr"] = built["initial_lr"]

    def reassert(self, before: Sequence[Mapping[str, object]], scheduler: LRScheduler | None) -> None:
        """Put in force what differs from a checkpoint's options; a schedule keeps its place.

        Args:
            before: What `plain` gave in the checkpoint.
            scheduler: The schedule, loaded.
        """
        changed = self._changed(before)
        groups = zip(self._optimizer.param_groups, self._built, changed, strict=True)
        for number, (group, built, names) in enumerate(groups):
            if "initial_lr" in names:
                then = before[number] if len(before) == len(self._built) else group
                old, new = then.get("initial_lr"), built["initial_lr"]
                scaled = isinstance(old, int | float) and old and isinstance(new, int | float)
                group["lr"] = group["lr"] * (new / old) if scaled else new  # type: ignore[operator]
            group.update({name: built[name] for name in names if name in group and name in built})
        if scheduler is not None and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in self._optimizer.param_groups]
        if isinstance(scheduler, FactorSchedule) and any("initial_lr" in names for names in changed):
            scheduler.apply()  # which knows of a floor that is a rate and no share, and does not scale

    def _changed(self, before: Sequence[Mapping[str, object]]) -> list[set[str]]:
        """Names of the options that differ, by group; all of them if the groups cannot be told apart."""
        now = self.plain()
        if len(before) != len(now):
            return [set(options) for options in now]
        return [
            {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
            for old, new in zip(before, now, strict=True)
        ]


def _kind(optimizer: Optimizer) -> str:
    if isinstance(optimizer, OptimizerFacade):
        return "+".join(_kind(member) for member in optimizer.optimizers)
    # A subclass takes up torch's state, and the other way round; checkpoints know it by this name.
    known = (kind.__name__ for kind in (AdamW, Muon) if isinstance(optimizer, kind))
    return next(known, type(optimizer).__name__)


def _options(group: Mapping[str, object]) -> Options:
    kept = {name: value for name, value in group.items() if name not in _LEFT_OUT}
    # A rate that is a tensor moves in place.
    rate = kept.get("initial_lr", group["lr"])
    return {**kept, "initial_lr": rate.item() if isinstance(rate, Tensor) else rate}


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
