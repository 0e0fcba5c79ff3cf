"""What a row of the table is, and what several rows have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from .reference import Recipe

PLAIN = Recipe()
EXACT = 1e-5
"""Bound on the relative deviation of a float32 row. Rounding alone gives up to about 1e-6: see the rows of
the reference itself, with its microbatches cut in another way."""
FLOAT16 = 5e-3
"""Bound of rows in float16, which keeps 11 bits of a product."""
BFLOAT16 = 2e-2
"""Bound of rows that compare numbers rounded to bfloat16 in different places; 2 ** -8 is 4e-3."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    A new kind of row needs a name in `runners.RUNNERS` and nothing else. Rows of several processes are sent
    to them, so what they are made of must pickle: functions with a name, no lambdas.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Training arguments beside those that the recipe implies."""
    options: Callable[[], Mapping[str, object]] = dict
    """Makes further options of `Trainer`."""
    accumulation: int = 1
    """Microbatches of a global batch, over all ranks."""
    recipe: Recipe = PLAIN
    """What the reference does."""
    runner: str = "here"
    world_size: int = 1
    next_world_size: int | None = None
    """World size after the restart of a row that is restarted; none: the same."""
    multiple: int = 1
    """What the length of each row is filled up to a multiple of."""
    mesh: str | None = None
    """Ranks in each dimension; none: all in that of the trainer."""
    next_mesh: str | None = None
    """The same after the restart, if then another trainer or another world size continues."""
    trainer: str = "ddp"
    """Who trains on ranks, a name in `training.TRAINERS`."""
    next_trainer: str | None = None
    """Who trains on ranks after the restart; none: the same."""
    full: bool = False
    """Trained by `table.py` and in `nox -s full` only: others do what it does together."""
    tolerance: float = EXACT
    because: str = ""
    """Why the bound is another one than `EXACT`."""


def on_ranks(
    label: str, name: str, *, ranks: int = 2, accumulation: int | None = None, **fields: object
) -> Case:
    """A row of several processes, by default with one microbatch for each rank and optimizer step.

    Args:
        label: What the name of the row begins with: the trainer's, in capitals.
        name: Name of the row behind that.
        ranks: The processes.
        accumulation: Microbatches of a global batch, over all ranks.
        **fields: Of the case.
    """
    return Case(
        name=f"{label}, {ranks} rank{'s' * (ranks > 1)}{', ' * bool(name)}{name}",
        **{"runner": "ranks", "trainer": label.lower(), **fields},  # type: ignore[arg-type]
        world_size=ranks,
        accumulation=accumulation or ranks,
    )


class SpoilGradient:
    """Makes one element of the gradient not a number, at one optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_forward_backward_end(self, args: object, state: object, control: object, **kw: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            kw["model"].head.weight.grad[0, 0] = torch.nan  # type: ignore[attr-defined]


class Overflow:
    """Makes one element of the gradient infinite at one optimizer step, on the last rank alone.

    Every rank checks its loss scale after each step: it is halved by that step and kept by the others.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_forward_backward_end(self, args: object, state: object, control: object, **kw: object) -> None:
        gradient = kw["model"].head.weight.grad  # type: ignore[attr-defined]
        if gradient is None:  # it comes with the last microbatch
            return
        alone = not isinstance(gradient, DTensor)
        is_last = alone or gradient.device_mesh.get_rank() == gradient.device_mesh.size() - 1
        if state.global_step == self.step and is_last:  # type: ignore[attr-defined]
            (gradient if alone else gradient.to_local())[0, 0] = torch.inf

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        found = kw["trainer"]._prepare().update._scaler.get_scale()  # type: ignore[attr-defined]
        expected = 65536 if state.global_step <= self.step else 32768  # type: ignore[attr-defined]
        if found != expected:
            raise RuntimeError(f"the loss scale is {found}, not {expected}")


def adamw(groups: list[dict[str, object]]) -> Optimizer:
    return AdamW(groups, PLAIN.learning_rate, PLAIN.betas, PLAIN.epsilon, PLAIN.weight_decay)


def decay_by_name(**options: object) -> Mapping[str, object]:
    exempt = {"weight_decay": 0.0, **options}
    return {"optimizer_groups": {"*norm.weight": exempt, "re:.*\\.bias": dict(exempt)}}


TIED = replace(PLAIN, tied=True)
SHORT = replace(PLAIN, steps=14)
"""Two epochs: each batch comes twice, and the end of an epoch once in between."""
SHORT_TIED = replace(SHORT, tied=True)
RESTARTED = replace(PLAIN, steps=18)
"""What rows do that stop and continue: to the end of that epoch, and into another one."""
MUON = replace(PLAIN, steps=14, optimizer="muon", ema_decay=0.9, evaluated=True)
MUON_BOUND = {"tolerance": 2e-3, "because": "Muon computes in bfloat16 what a last bit of a gradient turns"}
SCHEDULE_FREE = replace(PLAIN, steps=14, optimizer="schedule_free_adamw", evaluated=True)
UNCLIPPED = replace(PLAIN, max_grad_norm=None)
SHORT_UNCLIPPED = replace(SHORT, max_grad_norm=None)
COMPILED = {"torch_compile": True}
BY_EYE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
