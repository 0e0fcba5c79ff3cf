"""How a row is run; `Case.runner` names one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .case import Case
from .rank import Part
from .ranks import train_on_ranks
from .reference import Point, train
from .training import STOP_AT, Stop, build, compiled_as_told, points_of

Runner = Callable[[Case, Path], list[Point]]


def _by_reference(case: Case, directory: Path) -> list[Point]:
    return train(case.recipe, case.recipe.global_batch // case.accumulation)


def _by_reference_with_another_adamw(case: Case, directory: Path) -> list[Point]:
    other = replace(case.recipe, fused=not case.recipe.fused)
    return train(other, case.recipe.global_batch // case.accumulation)


def _here(case: Case, directory: Path) -> list[Point]:
    with compiled_as_told(case):
        trainer = build(case, directory)
        trainer.train()
    return points_of(case, trainer)


def _restarted(case: Case, directory: Path) -> list[Point]:
    with compiled_as_told(case):
        _begin(case, directory)
        return _go_on(case, directory)


def _begin(case: Case, directory: Path) -> None:
    build(case, directory, Stop(STOP_AT), save_strategy="steps").train()


def _go_on(case: Case, directory: Path) -> list[Point]:
    second = build(case, directory, save_strategy="steps")
    second.train()
    if second.state.session_start_step != STOP_AT:
        raise RuntimeError(f"the second start began at step {second.state.session_start_step}")
    return points_of(case, second)


def _on_ranks(case: Case, directory: Path) -> list[Point]:
    return train_on_ranks(case, directory, case.world_size, Part.WHOLE)


def _on_ranks_restarted(case: Case, directory: Path) -> list[Point]:
    train_on_ranks(case, directory, case.world_size, Part.FIRST)
    return train_on_ranks(case, directory, case.next_world_size or case.world_size, Part.SECOND)


def _on_ranks_then_here(case: Case, directory: Path) -> list[Point]:
    train_on_ranks(case, directory, case.world_size, Part.FIRST)
    return _go_on(case, directory)


def _here_then_on_ranks(case: Case, directory: Path) -> list[Point]:
    _begin(case, directory)
    return train_on_ranks(case, directory, case.world_size, Part.SECOND)


RUNNERS: dict[str, Runner] = {
    "reference": _by_reference,
    "reference with another AdamW": _by_reference_with_another_adamw,
    "here": _here,
    "restarted": _restarted,
    "ranks": _on_ranks,
    "ranks, restarted": _on_ranks_restarted,
    "ranks, then here": _on_ranks_then_here,
    "here, then ranks": _here_then_on_ranks,
}
"""Each trains a row in an empty directory. With "ranks" in its name it is `case.trainer` in
`case.world_size` processes, otherwise `Trainer` in this one."""


def run(case: Case, directory: Path) -> list[Point]:
    """Train a row."""
    return RUNNERS[case.runner](case, directory)
