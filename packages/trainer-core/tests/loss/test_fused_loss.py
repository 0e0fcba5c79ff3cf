"""The fused loss over models, against the loss of their logits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer_core.errors import ConfigurationError
from trainer_core.loss import CausalLMLoss, FusedLinearCrossEntropy
from trainer_core.loss.fused import torch_has_it

BACKENDS = ["auto", "chunked", "torch"] if torch_has_it() else ["auto", "chunked"]


def assert_same_step(expected: tuple, found: tuple, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [{}, {"bias": True}, {"tied": True}])
def test_equals_the_loss_of_the_logits(tiny_lm, batch, step, backend: str, shape: dict) -> None:
    model = tiny_lm(**shape)
    fused = FusedLinearCrossEntropy(model.head, backend=backend, chunk_tokens=7)
    assert fused.count(batch["labels"]) == CausalLMLoss().count(batch["labels"])
    assert_same_step(step(CausalLMLoss(), model, batch), step(fused, model, batch))
    exact = "torch" if torch_has_it() else "chunked"
    assert fused.backend_in_use == (exact if backend == "auto" else backend)


def test_label_smoothing_and_z_loss(tiny_lm, batch, step) -> None:
    model, options = tiny_lm(), {"label_smoothing": 0.1, "z_loss": 1e-2}
    fused = FusedLinearCrossEntropy(model.head, **options)
    assert_same_step(step(CausalLMLoss(**options), model, batch), step(fused, model, batch))
    assert fused.backend_in_use == "chunked"


def test_frozen_head(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    model.head.weight.requires_grad_(False)
    expected, found = (
        step(CausalLMLoss(), model, batch),
        step(FusedLinearCrossEntropy(model.head), model, batch),
    )
    assert "head.weight" not in found[1]
    assert_same_step(expected, found)


def test_nothing_counted(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    total, gradients = step(FusedLinearCrossEntropy(model.head), model, nothing)
    assert total == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_accumulation_adds_gradients_up(tiny_lm, batch) -> None:
    gradients = []
    for make in (lambda model: CausalLMLoss(), lambda model: FusedLinearCrossEntropy(model.head)):
        model = tiny_lm(tied=True)
        loss = make(model)
        for rows in (slice(0, 2), slice(2, 4)):
            ids, labels = batch["input_ids"][rows], batch["labels"][rows]
            predictions = (
                loss.predict(model, {"input_ids": ids}, labels) if hasattr(loss, "predict") else model(ids)
            )
            loss(predictions, labels).backward()
        gradients.append(model.embed.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_computes_in_the_dtype_of_autocast(tiny_lm, batch, step, dtype) -> None:
    model = tiny_lm()
    fused = FusedLinearCrossEntropy(model.head)
    expected, found = step(CausalLMLoss(), model, batch, dtype=dtype), step(fused, model, batch, dtype=dtype)
    assert fused.backend_in_use == "chunked"
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 0.02 * gradient.norm(), name


def test_torch_is_refused_where_it_would_round_the_sum_or_is_too_old(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    rule = "adds up the loss in bfloat16" if torch_has_it() else "of torch 2.13 or later"
    with pytest.raises(ConfigurationError, match=rule):
        step(FusedLinearCrossEntropy(model.head, backend="torch"), model, batch, dtype=torch.bfloat16)


def test_the_model_is_as_it_was_outside(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    before = model(batch["input_ids"]), copy.deepcopy(model.state_dict()), list(model.state_dict())
    fused = FusedLinearCrossEntropy(model.head)
    step(fused, model, batch)
    assert "forward" not in vars(model.head)
    assert torch.equal(model(batch["input_ids"]), before[0])
    assert list(model.state_dict()) == before[2]
    model.after = lambda logits: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(fused, model, batch)
    assert "forward" not in vars(model.head)


def test_evaluation_without_gradients(tiny_lm, batch) -> None:
    model = tiny_lm(dropout=0.5).eval()
    fused = FusedLinearCrossEntropy(model.head)
    inputs, labels = {"input_ids": batch["input_ids"]}, batch["labels"]
    expected = CausalLMLoss()(model(**inputs), labels)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            total = fused(fused.predict(model, inputs, labels), labels)
        assert not total.requires_grad
        torch.testing.assert_close(total, expected.detach())


def in_place(logits: Tensor) -> Tensor:
    return logits.mul_(0.5)


AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda logits: logits * 0.5,
    "soft-capped": lambda logits: 30 * torch.tanh(logits / 30),
    "cut": lambda logits: logits[:, :-1],
    "cut off from the gradient": lambda logits: logits.detach(),
    "changed in place": in_place,
    "cast": lambda logits: logits.double(),
    "copied": lambda logits: logits.clone(),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_logits_that_are_changed_afterwards_are_refused(tiny_lm, batch, step, name: str) -> None:
    model = tiny_lm(after=AFTERWARDS[name])
    with pytest.raises(ConfigurationError, match=r"fused_loss=.*fused_loss='no'"):
        step(FusedLinearCrossEntropy(model.head), model, batch)


def test_logits_in_another_shape_of_the_same_memory_are_refused(tiny_lm, batch, step) -> None:
    model = tiny_lm(after=lambda logits: logits.unsqueeze(0))
    with pytest.raises(ConfigurationError, match="does not return the logits of its output head as they are"):
        step(FusedLinearCrossEntropy(model.head), model, batch)
    model.after = lambda logits: logits.view_as(logits)
    fused = FusedLinearCrossEntropy(model.head)
    assert_same_step(step(CausalLMLoss(), model, batch), step(fused, model, batch))


def test_a_head_that_is_called_twice_or_never_is_refused(tiny_lm, batch, step) -> None:
    model = tiny_lm()
    with pytest.raises(ConfigurationError, match="0 times"):
        step(FusedLinearCrossEntropy(nn.Linear(12, 29)), model, batch)
    model.after = lambda logits: logits + model.head(model.hidden(batch["input_ids"]))
    with pytest.raises(ConfigurationError, match="2 times"):
        step(FusedLinearCrossEntropy(model.head), model, batch)


def test_hidden_states_that_do_not_fit_are_refused(tiny_lm, batch) -> None:
    fused = FusedLinearCrossEntropy(tiny_lm().head)
    with pytest.raises(ConfigurationError, match=r"\[4, 9, 12\]"):
        fused(torch.zeros(4, 8, 12), batch["labels"])
    with pytest.raises(ConfigurationError, match="from hidden states"):
        fused({"logits": torch.zeros(4, 9, 29)}, batch["labels"])


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.1


def test_a_head_that_is_no_plain_linear_layer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"is not an nn\.Linear"):
        FusedLinearCrossEntropy(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(ConfigurationError, match=r"Scaled.*computes something of its own"):
        FusedLinearCrossEntropy(Scaled(2, 3))
    patched = nn.Linear(2, 3)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="computes something of its own"):
        FusedLinearCrossEntropy(patched)


class Cooperative(nn.Module):
    """Post-processes its logits, and hands out the hidden states that its loss is to be computed from."""

    can_return_hidden_states = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, return_hidden_states: bool = False) -> object:
        hidden = self.inner.hidden(input_ids)
        return {"last_hidden_state": hidden} if return_hidden_states else self.inner.head(hidden) * 1.0


def test_a_model_may_offer_its_hidden_states(tiny_lm, batch, step) -> None:
    model = Cooperative(tiny_lm())
    fused = FusedLinearCrossEntropy(model.inner.head)
    assert_same_step(step(CausalLMLoss(), model, batch), step(fused, model, batch))
    model.forward = lambda input_ids, return_hidden_states: {}
    with pytest.raises(ConfigurationError, match="can_return_hidden_states"):
        step(fused, model, batch)
