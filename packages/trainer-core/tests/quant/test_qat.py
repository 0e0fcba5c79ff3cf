"""Quantization-aware training: prepare, train, convert."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from trainer_core import ConfigurationError
from trainer_core.precision import QAT_RECIPES, convert_qat, convert_to_fp8, prepare_qat

FIRST, *REST = QAT_RECIPES


@pytest.mark.parametrize(
    ("recipe", "mixed_precision"),
    [
        *((recipe, None) for recipe in QAT_RECIPES),
        (FIRST, "bf16"),
        *(pytest.param(recipe, "bf16", marks=pytest.mark.full) for recipe in REST),
    ],
)
def test_recipe_trains_like_full_precision(lab: Any, recipe: str, mixed_precision: str | None) -> None:
    args = lab.settings(qat_recipe=recipe, mixed_precision=mixed_precision)
    model = lab.model()
    prepare_qat(model, args, lab.cpu)
    found = lab.train(model, args)
    expected = lab.train(lab.model(), lab.settings(mixed_precision=mixed_precision))
    assert found != expected, "rounding must show"
    assert found[-1] < 0.01 * found[0]
    assert found == pytest.approx(expected, abs=0.15), "at every step; the loss starts at 3.6"


@pytest.mark.parametrize("recipe", QAT_RECIPES)
def test_converted_model_computes_what_was_trained(lab: Any, recipe: str) -> None:
    """Training saw the very numbers that the converted model computes with."""
    args = lab.settings(qat_recipe=recipe)
    model = lab.model()
    prepare_qat(model, args, lab.cpu)
    lab.train(model, args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    deployable = convert_qat(model, recipe)
    with torch.no_grad():
        torch.testing.assert_close(deployable(lab.batch()), model(lab.batch()), rtol=1e-4, atol=1e-4)
    assert torch.equal(lab.generate(deployable), lab.generate(model))
    assert not deployable.training
    assert not any(parameter.requires_grad for parameter in deployable.parameters())

    weight = deployable.layers[0].q_proj.weight
    bound = 2 ** (QAT_RECIPES[recipe].weight_bits - 1)
    assert weight.qdata.dtype == torch.int8
    assert -bound <= int(weight.qdata.min())
    assert int(weight.qdata.max()) < bound

    lab.train(model, args, 2)
    assert model.training, "the trained model can continue"
    assert not torch.equal(model.embed.weight, before["embed.weight"])
    assert torch.equal(deployable.embed.weight, before["embed.weight"]), "and takes nothing along"


def test_quantizing_after_plain_training_is_worse(lab: Any) -> None:
    """What the rounding during training is for."""
    args = lab.settings(qat_recipe="int4-weight-only")
    trained, plain = lab.model(), lab.model()
    prepare_qat(trained, args, lab.cpu)
    lab.train(trained, args, 120)
    lab.train(plain, lab.settings(), 120)
    with torch.no_grad():
        exact = plain(lab.batch())
    prepare_qat(plain, args, lab.cpu)
    with torch.no_grad():
        rounding = (plain(lab.batch()) - exact).abs().max()
        kept = (convert_qat(trained, "int4-weight-only")(lab.batch()) - trained(lab.batch())).abs().max()
    assert kept < 0.01 * rounding


def test_checkpoint_of_the_training_is_an_ordinary_one(lab: Any) -> None:
    model = lab.model(tied=True)
    names = list(model.state_dict())
    parameters = dict(model.named_parameters())
    state = torch.get_rng_state()
    prepare_qat(model, lab.settings(qat_recipe="int4-weight-only"), lab.cpu)
    assert list(model.state_dict()) == names
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert torch.equal(torch.get_rng_state(), state)
    lab.train(model, lab.settings(), 2)
    assert list(model.state_dict()) == names
    lab.model(tied=True, seed=1).load_state_dict(model.state_dict())


def test_report_and_log(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report = prepare_qat(lab.model(), lab.settings(qat_recipe="int4-weight-only"), lab.cpu)
    assert len(report.converted) == 7 + 6
    assert report.left_alone == {
        "input size 40 is not a multiple of the group size 32": ("layers.1.down_proj",),
        "the output layer": ("lm_head",),
    }
    logged = [record.getMessage() for record in caplog.records]
    assert str(report) in logged
    assert "int4 weights in groups of 32" in str(report)
    assert report.fp8_share == 0.0


def test_one_scale_a_row_needs_no_groups(lab: Any) -> None:
    report = prepare_qat(lab.model(), lab.settings(qat_recipe="int8-weight-only"), lab.cpu)
    assert report.left_alone == {"the output layer": ("lm_head",)}


def test_shared_weight_is_left_alone(lab: Any) -> None:
    model = lab.model()
    model.lookup = nn.Embedding(64, 64)
    model.layers[0].q_proj.weight = model.lookup.weight
    report = prepare_qat(model, lab.settings(qat_recipe="int8-weight-only"), lab.cpu)
    assert report.left_alone["shares its weight with another module"] == ("layers.0.q_proj",)


def test_model_without_storage_is_prepared(lab: Any) -> None:
    with torch.device("meta"):
        model = lab.model(tied=True)
    parameters = dict(model.named_parameters())
    prepare_qat(model, lab.settings(qat_recipe="int8-weight-only"), lab.cpu)
    assert all(parameter.is_meta for parameter in parameters.values())
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.full
def test_compiled_model_trains(lab: Any) -> None:
    args = lab.settings(qat_recipe="int8-dynamic-act-int4-weight")
    eager, compiled = lab.model(), lab.model()
    for model in (eager, compiled):
        del model.layers[1]
        prepare_qat(model, args, lab.cpu)
    compiled.compile(backend="aot_eager")
    assert lab.train(compiled, args, 2) == pytest.approx(lab.train(eager, args, 2), rel=1e-3)
    deployable = convert_qat(compiled, "int8-dynamic-act-int4-weight")
    assert torch.equal(lab.generate(deployable, 3), lab.generate(eager, 3))


def test_unknown_recipe_is_refused(lab: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"qat_recipe='int3'.*Choose one of int8-dynamic-act-int4-weight"
    ):
        convert_qat(lab.model(), "int3")


def test_nothing_to_prepare_is_refused(lab: Any) -> None:
    model = nn.Sequential(nn.Linear(40, 40))
    message = r"cannot prepare any linear layer \(1 input size 40 is not a multiple of the group size 32\)"
    with pytest.raises(ConfigurationError, match=message):
        prepare_qat(model, lab.settings(qat_recipe="int4-weight-only"), lab.cpu)


def test_fp8_and_qat_exclude_each_other(lab: Any) -> None:
    qat, fp8 = (
        lab.settings(qat_recipe="int8-weight-only"),
        lab.settings(fp8_recipe="rowwise", fp8_emulate=True),
    )
    model = lab.model()
    prepare_qat(model, qat, lab.cpu)
    with pytest.raises(
        ConfigurationError, match=r"'layers\.0\.q_proj' is a FakeQuantizedLinear of torchao already"
    ):
        convert_to_fp8(model, fp8, lab.cpu)
    model = lab.model()
    convert_to_fp8(model, fp8, lab.cpu)
    with pytest.raises(ConfigurationError, match=r"'layers\.0\.q_proj' is a Float8Linear of torchao already"):
        prepare_qat(model, qat, lab.cpu)


def test_conversion_needs_the_recipe_of_the_training(lab: Any) -> None:
    model = lab.model()
    with pytest.raises(ConfigurationError, match=r"this TinyLlama was not\. Call prepare_qat"):
        convert_qat(model, "int8-weight-only")
    prepare_qat(model, lab.settings(qat_recipe="int8-weight-only"), lab.cpu)
    for other in set(QAT_RECIPES) - {"int8-weight-only"}:
        with pytest.raises(
            ConfigurationError, match=r"is not the recipe that layer 'layers\.0\.q_proj' was trained with"
        ):
            convert_qat(model, other)


def test_replaced_forward_is_refused(lab: Any) -> None:
    model = lab.model()
    prepare_qat(model, lab.settings(qat_recipe="int8-weight-only"), lab.cpu)
    block = model.layers[0]
    ordinary = block.forward
    block.forward = lambda x: ordinary(x)
    with pytest.raises(ConfigurationError, match=r"forward method of module 'layers\.0' was replaced"):
        convert_qat(model, "int8-weight-only")
