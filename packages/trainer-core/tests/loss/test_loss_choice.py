"""Which loss a run gets, and what is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from trainer_core.errors import ConfigurationError
from trainer_core.loss import CausalLMLoss, FusedLinearCrossEntropy, MeanLoss, check_loss, loss_of, predict
from trainer_core.loss.chunked import ChunkedOptions
from trainer_core.loss.fused import choose, torch_has_it


def test_the_loss_of_the_logits_is_the_default(tiny_lm, settings) -> None:
    loss = loss_of(settings(label_smoothing=0.1, z_loss=0.2), nn.Linear(1, 1))
    assert isinstance(loss, CausalLMLoss)
    assert (loss.label_smoothing, loss.z_loss) == (0.1, 0.2)


def test_a_fused_loss_takes_the_head_of_the_model(tiny_lm, settings) -> None:
    model = tiny_lm()
    loss = loss_of(settings(label_smoothing=0.1, z_loss=0.2, fused_loss="auto"), model)
    assert isinstance(loss, FusedLinearCrossEntropy)
    assert loss.head is model.head
    assert (loss.label_smoothing, loss.z_loss, loss.backend) == (0.1, 0.2, "auto")


def test_the_loss_of_the_user_goes_first(tiny_lm, settings) -> None:
    given = MeanLoss(lambda logits, labels: logits.mean(), lambda labels: (labels >= 0).sum())
    assert loss_of(settings(), tiny_lm(), given) is given


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "fused_loss"])
def test_settings_without_effect_beside_a_loss_of_the_user_are_refused(settings, name: str) -> None:
    value = "auto" if name == "fused_loss" else 0.1
    with pytest.raises(ConfigurationError, match=f"^{name}=.*has no effect together with compute_loss_func"):
        check_loss(settings(**{name: value}), CausalLMLoss())


def test_a_function_without_a_count_is_refused(settings) -> None:
    with pytest.raises(ConfigurationError, match=r"MeanLoss\(function, count\)"):
        check_loss(settings(), lambda logits, labels: logits.mean())


def test_a_model_that_does_not_name_its_head_is_refused(settings) -> None:
    with pytest.raises(ConfigurationError, match="get_output_embeddings"):
        loss_of(settings(fused_loss="auto"), nn.Linear(2, 2))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="auto, torch, chunked, liger, cut"):
        FusedLinearCrossEntropy(nn.Linear(2, 3), backend="fast")


@pytest.mark.parametrize(("backend", "module"), [("liger", "liger_kernel"), ("cut", "cut_cross_entropy")])
def test_kernel_libraries_say_what_they_miss(backend: str, module: str) -> None:
    installed = all(importlib.util.find_spec(name) is not None for name in (module, "triton"))
    rule = (
        "need a GPU, but the output head is on cpu"
        if installed
        else "not installed. Install it with `pip install"
    )
    with pytest.raises(ConfigurationError, match=rule):
        FusedLinearCrossEntropy(nn.Linear(2, 3), backend=backend)


def test_what_torch_does_not_know_is_refused() -> None:
    rule = "does not support label_smoothing and z_loss" if torch_has_it() else "of torch 2.13 or later"
    with pytest.raises(ConfigurationError, match=rule):
        FusedLinearCrossEntropy(nn.Linear(2, 3), backend="torch", label_smoothing=0.1, z_loss=0.1)


def test_auto_takes_torch_only_where_it_is_exact() -> None:
    exact = "torch" if torch_has_it() else "chunked"
    assert choose(ChunkedOptions(torch.float32)) == exact
    assert choose(ChunkedOptions(torch.float64)) == exact
    assert choose(ChunkedOptions(torch.bfloat16)) == "chunked"
    assert choose(ChunkedOptions(torch.float32, label_smoothing=0.1)) == "chunked"
    assert choose(ChunkedOptions(torch.float32, z_loss=0.1)) == "chunked"


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk_tokens=0"):
        FusedLinearCrossEntropy(nn.Linear(2, 3), chunk_tokens=0)


class SumOfSquares:
    """A loss of hidden states, without any meaning."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels >= 0).sum()

    def __call__(self, predictions: object, labels: torch.Tensor) -> torch.Tensor:
        assert isinstance(predictions, torch.Tensor)
        return predictions.square().sum() + self.head.weight.sum()  # type: ignore[union-attr, operator]


def test_a_factory_is_given_the_head_and_its_loss_the_hidden_states(tiny_lm, settings) -> None:
    model = tiny_lm()
    loss = loss_of(settings(), model, None, SumOfSquares)
    ids = torch.arange(6).view(1, 6)
    hidden = predict(loss, model, {"input_ids": ids}, ids)
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape == (1, 6, model.head.in_features)
    assert torch.equal(model.head(hidden), model(input_ids=ids))
    assert torch.equal(loss(hidden, ids), hidden.square().sum() + model.head.weight.sum())
    assert loss.count(ids) == 6


def test_a_factory_excludes_settings_and_another_loss(tiny_lm, settings) -> None:
    with pytest.raises(
        ConfigurationError, match="fused_loss='auto' has no effect together with fused_loss_factory"
    ):
        check_loss(settings(fused_loss="auto"), None, SumOfSquares)
    with pytest.raises(ConfigurationError, match="given together with compute_loss_func"):
        check_loss(settings(), CausalLMLoss(), SumOfSquares)
    with pytest.raises(ConfigurationError, match="sum and tells"):
        loss_of(settings(), tiny_lm(), None, lambda head: nn.functional.cross_entropy)
