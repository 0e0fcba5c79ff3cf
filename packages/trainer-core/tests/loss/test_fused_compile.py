"""The fused loss over compiled models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer_core.errors import ConfigurationError
from trainer_core.loss import CausalLMLoss, FusedLinearCrossEntropy


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def test_equals_the_loss_of_the_logits_and_compiles_once(tiny_lm, batch, step) -> None:
    expected = step(CausalLMLoss(), tiny_lm(tied=True), batch)
    model = compiled(tiny_lm(tied=True))
    fused = FusedLinearCrossEntropy(model.head)
    before = graphs()
    for _ in range(4):
        total, gradients = step(fused, model, batch)
        torch.testing.assert_close(total, expected[0], rtol=1e-6, atol=1e-6)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-6)
    assert graphs() - before == 1


def test_the_ordinary_forward_gives_logits_before_between_and_after(tiny_lm, batch, step) -> None:
    plain, model = tiny_lm(), compiled(tiny_lm())
    fused, other = FusedLinearCrossEntropy(model.head), FusedLinearCrossEntropy(model.head)
    logits, expected = plain(batch["input_ids"]), step(CausalLMLoss(), plain, batch)
    before = graphs()
    for _ in range(3):
        torch.testing.assert_close(model(batch["input_ids"]), logits)
        for loss in (fused, other):
            torch.testing.assert_close(step(loss, model, batch)[0], expected[0])
    # One with the head and one around it, which serves both losses: each was told its own hidden states.
    assert graphs() - before == 2


def test_training_and_evaluation_are_two_graphs(tiny_lm, batch, step) -> None:
    model = compiled(tiny_lm())
    fused = FusedLinearCrossEntropy(model.head)
    inputs, labels = {"input_ids": batch["input_ids"]}, batch["labels"]
    before = graphs()
    for _ in range(3):
        trained = step(fused, model.train(), batch)[0]
        with torch.no_grad():
            evaluated = fused(fused.predict(model.eval(), inputs, labels), labels)
        torch.testing.assert_close(evaluated, trained)
    assert graphs() - before == 2


def in_place(logits: Tensor) -> Tensor:
    return logits.mul_(0.5)


@pytest.mark.parametrize("after", [lambda x: x * 0.5, in_place, lambda x: x[:, :-1], torch.clone])
def test_logits_that_are_changed_afterwards_are_refused(tiny_lm, batch, step, after) -> None:
    model = compiled(tiny_lm(after=after))
    with pytest.raises(ConfigurationError, match=r"fused_loss=.*fused_loss='no'"):
        step(FusedLinearCrossEntropy(model.head), model, batch)


def test_wrapped_by_torch_compile(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    fused, wrapped = FusedLinearCrossEntropy(model.head), torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(step(fused, wrapped, batch)[0], step(CausalLMLoss(), model, batch)[0])
