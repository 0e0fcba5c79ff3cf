"""Losses that the model or the user computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_core.errors import ConfigurationError
from trainer_core.loss import (
    CausalLMLoss,
    MeanLoss,
    ModelLoss,
    OutputMeanLoss,
    count_next_tokens,
    logits_of,
    predict,
)


def mean_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(nn.Module):
    """Computes its own loss, by Hugging Face's convention or as a mean."""

    def __init__(self, inner: nn.Module, *, extra: float = 0.0) -> None:
        super().__init__()
        self.inner, self.extra = inner, extra
        self.calls = 0

    def loss(self, input_ids: Tensor, labels: Tensor, items: Tensor | None) -> SimpleNamespace:
        self.calls += 1
        logits = self.inner(input_ids)
        mean = mean_of(logits, labels)
        total = CausalLMLoss()(logits, labels)
        return SimpleNamespace(loss=(mean if items is None else total / items) + self.extra, logits=logits)


class TakesItems(OwnLoss):
    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> object:
        return self.loss(input_ids, labels, num_items_in_batch)


class TakesAnything(OwnLoss):
    """Takes any argument, and heeds none: only what it returns tells that this is a mean."""

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: object) -> object:
        return self.loss(input_ids, labels, None)


class MeanOnly(OwnLoss):
    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        return {"loss": self.loss(input_ids, labels, None).loss}


@pytest.mark.parametrize("kind", [TakesItems, TakesAnything, MeanOnly])
def test_equals_the_loss_of_the_logits(tiny_lm, batch, step, kind: type[OwnLoss]) -> None:
    model = kind(tiny_lm(dropout=0.0))
    expected, own = step(CausalLMLoss(), model.inner, batch), ModelLoss(count=count_next_tokens)
    for _ in range(2):
        total, gradients = step(own, model, batch)
        torch.testing.assert_close(total, expected[0], rtol=1e-6, atol=1e-6)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(gradients[f"inner.{name}"], gradient, rtol=1e-5, atol=1e-6)
    calls = model.calls
    step(own, model, batch)
    assert model.calls == calls + 1  # what kind of loss it is was found out once


@pytest.mark.parametrize("kind", [TakesItems, TakesAnything, MeanOnly])
def test_nothing_counted_is_zero_with_zero_gradient(tiny_lm, batch, step, kind: type[OwnLoss]) -> None:
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    total, gradients = step(ModelLoss(count=count_next_tokens), kind(tiny_lm()), nothing)
    assert total == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_finding_out_leaves_the_model_and_the_generators_alone(tiny_lm, batch, step) -> None:
    model = TakesItems(tiny_lm(dropout=0.5))
    model.inner.mix.eval()
    own = ModelLoss(count=count_next_tokens)
    torch.manual_seed(0)
    first = step(own, model, batch)[0]
    torch.manual_seed(0)
    assert torch.equal(step(own, model, batch)[0], first)
    assert [model.training, model.inner.mix.training] == [True, False]


@pytest.mark.parametrize("kind", [TakesItems, TakesAnything, MeanOnly])
def test_a_count_that_does_not_fit_the_mean_is_refused(tiny_lm, batch, step, kind: type[OwnLoss]) -> None:
    wrong = ModelLoss(count=lambda labels: (labels != -100).sum() ** 2)
    with pytest.raises(ConfigurationError, match="count=count_next_tokens"):
        step(wrong, kind(tiny_lm()), batch)


def test_a_loss_with_a_further_term_is_refused(tiny_lm, batch, step) -> None:
    model = TakesItems(tiny_lm(), extra=3.0)
    with pytest.raises(ConfigurationError, match="auxiliary"):
        step(ModelLoss(count=count_next_tokens), model, batch)


def test_models_without_labels_or_loss_are_refused(tiny_lm, batch, step) -> None:
    own = ModelLoss(count=count_next_tokens)
    with pytest.raises(ConfigurationError, match="needs the argument labels"):
        step(own, tiny_lm(), batch)
    silent = tiny_lm()
    silent.forward = lambda input_ids, labels: {"logits": 0}
    with pytest.raises(ConfigurationError, match="not a scalar loss"):
        step(own, silent, batch)


def test_outputs_without_logits_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"ModelLoss\(count"):
        logits_of({"loss": torch.zeros(())})
    with pytest.raises(ConfigurationError, match="neither logits nor a loss"):
        logits_of({"last": torch.zeros(())})
    logits = torch.zeros(1, 2, 3)
    for outputs in (logits, {"logits": logits}, SimpleNamespace(logits=logits)):
        assert logits_of(outputs) is logits


def test_mean_of_the_whole_output(tiny_lm, batch, step) -> None:
    class Two(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor) -> dict[str, object]:
            logits = self.inner(input_ids)
            return {"logits": logits, "more": (logits * 2,)}

    model = Two(tiny_lm())
    whole = OutputMeanLoss(lambda out, labels: mean_of(out["more"][0] / 2, labels), count_next_tokens)
    expected, found = step(CausalLMLoss(), model, batch), step(whole, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    total, gradients = step(whole, model, nothing)
    assert total == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_mean_of_the_logits(tiny_lm, batch, step) -> None:
    model, mean = tiny_lm(), MeanLoss(mean_of, count_next_tokens)
    expected = step(CausalLMLoss(), model, batch)
    torch.testing.assert_close(step(mean, model, batch), expected, rtol=1e-5, atol=1e-6)
    nothing = torch.full_like(batch["labels"], -100)
    logits = model(batch["input_ids"]).detach().requires_grad_()
    mean(logits, nothing).backward()
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0
    logits.grad = None
    mean(logits, batch["labels"]).backward()
    assert logits.grad.count_nonzero() > 0  # nothing of the call before is left on the caller's tensor


def test_predict_runs_the_model_as_the_loss_wants_it(tiny_lm, batch) -> None:
    model, inputs = tiny_lm(), {"input_ids": batch["input_ids"]}
    torch.testing.assert_close(predict(CausalLMLoss(), model, inputs, batch["labels"]), model(**inputs))
    torch.testing.assert_close(
        CausalLMLoss()(SimpleNamespace(logits=model(**inputs)), batch["labels"]),
        CausalLMLoss()(model(**inputs), batch["labels"]),
    )
