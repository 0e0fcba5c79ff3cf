"""Collection by hand, freezing, and the point from which cached device memory is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from trainer_core import TrainingArguments
from trainer_core.run import GarbagePolicy, next_limit

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.unfreeze()  # what was there before the first test
    yield
    gc.unfreeze()
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def dead_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_garbage_is_collected_at_the_chosen_steps_only() -> None:
    with GarbagePolicy(TrainingArguments(gc_steps=3), CPU) as garbage:
        assert not gc.isenabled()
        dead = dead_cycle()
        alive = []
        for step in (1, 2, 3):
            garbage.after_step(step)
            alive.append(dead() is not None)
    assert alive == [True, True, False]
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_put_back_as_it_was_after_an_error(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    args = TrainingArguments(gc_steps=3, gc_freeze=True)
    frozen = []

    def run() -> None:
        with GarbagePolicy(args, CPU):
            frozen.append(gc.get_freeze_count())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert frozen[0] > 0
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


def test_frozen_objects_of_somebody_else_stay_frozen() -> None:
    gc.freeze()
    with GarbagePolicy(TrainingArguments(gc_freeze=True), CPU):
        pass
    assert gc.get_freeze_count() > 0


def test_by_default_python_collects_as_always() -> None:
    with GarbagePolicy(TrainingArguments(), CPU) as garbage:
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        dead = dead_cycle()
        garbage.after_step(1)
        garbage.relieve_device()
        assert dead() is not None


def test_cache_is_emptied_again_only_after_more_was_reserved() -> None:
    first = next_limit(1000, 0.5, reserved=0)
    assert first == 500
    again = next_limit(1000, 0.5, reserved=600)
    assert again == pytest.approx(650)
    assert next_limit(1000, 0.5, reserved=300) == 500
