"""float16 that finds no loss scale: no policy lets the run continue as if it trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_core import NonFiniteGradientError, Trainer


class Poison:
    """Makes every gradient from one step on not a number."""

    def __init__(self, first: int, last: int = 10**9) -> None:
        self.first, self.last = first, last

    def on_forward_backward_end(
        self, args: object, state: object, control: object, *, model: torch.nn.Module, **_: object
    ) -> None:
        step = state.global_step + 1  # type: ignore[attr-defined]
        if self.first <= step <= self.last:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = float("nan")  # type: ignore[index]


SETTINGS = {
    "max_steps": 40,
    "num_train_epochs": -1,
    "mixed_precision": "fp16",
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 100,
}


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_the_error_comes_at_the_look(make_trainer: Callable[..., Trainer], policy: str) -> None:
    trainer = make_trainer(callbacks=[Poison(5)], nonfinite_policy=policy, **SETTINGS)
    with pytest.raises(NonFiniteGradientError, match=r"step(s from)? 5"):
        trainer.train()
    assert trainer.state.global_step == 30  # 25 in a row are skipped by step 29, and 30 is the next look
    assert trainer.saved_step == -1


def test_a_scale_that_is_found_in_the_end_is_no_error(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(callbacks=[Poison(5, 28)], nonfinite_policy="skip", **SETTINGS)
    assert trainer.train().global_step == 40
    assert trainer.saved_step == 40


def test_the_scale_does_not_show_in_a_run(
    make_trainer: Callable[..., Trainer], curve: Callable[[Trainer], list[tuple[float, float]]]
) -> None:
    """Loss and gradient norm are those of float32 but for rounding, over accumulated microbatches too."""
    settings = {"max_steps": 4, "num_train_epochs": -1, "gradient_accumulation_steps": 2}
    curves = []
    for precision in ("no", "fp16"):
        trainer = make_trainer(mixed_precision=precision, **settings)
        trainer.train()
        curves.append(torch.tensor(curve(trainer)))
    assert curves[0].shape == (4, 2)
    torch.testing.assert_close(curves[1], curves[0], rtol=0.01, atol=0)
