"""FP8: every recipe trains by emulation, and says what it converted or why it cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from trainer_core import ConfigurationError
from trainer_core.precision import FP8_RECIPES, convert_to_fp8
from trainer_core.precision.fp8 import lacks_fp8, share_in_fp8

BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUNS_IN = [
    ("tensorwise", None),
    pytest.param("tensorwise", "bf16", marks=pytest.mark.full),
    pytest.param("rowwise", None, marks=pytest.mark.full),
    ("rowwise", "bf16"),
    ("rowwise_with_gw_hp", None),
]


def fp8_class() -> type[nn.Module]:
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear


@pytest.mark.parametrize(("recipe", "mixed_precision"), RUNS_IN)
def test_recipe_trains_like_full_precision(lab: Any, recipe: str, mixed_precision: str | None) -> None:
    args = lab.settings(fp8_recipe=recipe, fp8_emulate=True, mixed_precision=mixed_precision)
    model = lab.model()
    convert_to_fp8(model, args, lab.cpu)
    found = lab.train(model, args)
    expected = lab.train(lab.model(), lab.settings(mixed_precision=mixed_precision))
    assert found != expected, "rounding to FP8 must show"
    assert found[-1] < 0.01 * found[0]
    assert found == pytest.approx(expected, abs=0.05), "at every step; the loss starts at 3.6"


def test_refusal_of_what_torchao_cannot_run(lab: Any) -> None:
    """torchao 0.18 looks only at the GPU's autocast, and leaves the input in float32 on the CPU."""
    args = lab.settings(fp8_recipe="rowwise_with_gw_hp", fp8_emulate=True, mixed_precision="bf16")
    model = lab.model()
    message = r"fp8_recipe='rowwise_with_gw_hp' cannot train .* mixed_precision='bf16' on 'cpu' in torchao: "
    with pytest.raises(ConfigurationError, match=message + "RuntimeError: expected m1 and m2"):
        convert_to_fp8(model, args, lab.cpu)
    assert not any(isinstance(module, fp8_class()) for module in model.modules()), "nothing was converted"


def test_weights_names_and_random_numbers_stay(lab: Any) -> None:
    model = lab.model().eval()
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    convert_to_fp8(model, lab.settings(fp8_recipe="rowwise", fp8_emulate=True), lab.cpu)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in after.values())
    assert not any(module.training for module in model.modules())


def test_report_and_log(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    args = lab.settings(fp8_recipe="tensorwise", fp8_emulate=True, fp8_exclude=("*.k_proj",))
    with caplog.at_level(logging.INFO):
        report = convert_to_fp8(lab.model(), args, lab.cpu)
    converted = [f"layers.0.{name}" for name in BLOCK if name != "k_proj"]
    assert report.converted == (*converted, "layers.1.q_proj", "layers.1.v_proj", "layers.1.o_proj")
    assert report.left_alone == {
        "excluded by '*.k_proj'": ("layers.0.k_proj", "layers.1.k_proj"),
        "sizes 64 to 40 are not multiples of 16": ("layers.1.gate_proj", "layers.1.up_proj"),
        "sizes 40 to 64 are not multiples of 16": ("layers.1.down_proj",),
        "the output layer": ("lm_head",),
    }
    assert report.total == 15
    assert report.all_weights == 8 * 64 * 64 + 3 * 64 * 128 + 3 * 64 * 40 + 64 * 32
    assert report.converted_weights == 6 * 64 * 64 + 3 * 64 * 128
    assert report.fp8_share == 0.0, "emulated products run in float32"
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert str(report) in logged
    assert "FP8 tensorwise: 9 of 15 linear layers" in str(report)
    assert "torchao" in str(report)


def test_warning_without_compile_is_given_once(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    # The number is that of no other test: a warning that repeats word for word is given once per process.
    given = {
        "fp8_recipe": "rowwise",
        "fp8_emulate": True,
        "fp8_exclude": ("layers.1", "*.o_proj", "*.k_proj"),
    }
    convert_to_fp8(lab.model(), lab.settings(**given, torch_compile=True), lab.cpu)
    assert "slower" not in caplog.text
    convert_to_fp8(lab.model(), lab.settings(**given), lab.cpu)
    convert_to_fp8(lab.model(), lab.settings(**given), lab.cpu)
    assert caplog.text.count("5 FP8 layers (rowwise) without torch_compile are slower than bf16") == 1


def test_share_in_fp8_for_the_peak(lab: Any) -> None:
    assert share_in_fp8(lab.settings(fp8_recipe="rowwise"), 0.75) == 0.75
    assert share_in_fp8(lab.settings(fp8_recipe="rowwise_with_gw_hp"), 0.75) == pytest.approx(0.5)
    assert share_in_fp8(lab.settings(fp8_recipe="rowwise", fp8_emulate=True), 0.75) == 0.0


def test_alignment_0_converts_all_but_the_output_layer(lab: Any) -> None:
    args = lab.settings(fp8_recipe="tensorwise", fp8_emulate=True, fp8_dim_alignment=0)
    model = lab.model()
    report = convert_to_fp8(model, args, lab.cpu)
    assert len(report.converted) == 14
    assert type(model.lm_head) is nn.Linear


@pytest.mark.full
def test_compiled_model_trains(lab: Any) -> None:
    args = lab.settings(fp8_recipe="rowwise", fp8_emulate=True, torch_compile=True)
    eager, compiled = lab.model(), lab.model()
    for model in (eager, compiled):
        del model.layers[1]
        convert_to_fp8(model, args, lab.cpu)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert lab.train(compiled, args, 2) == pytest.approx(lab.train(eager, args, 2), rel=1e-3)


def test_model_without_storage_is_converted(lab: Any) -> None:
    with torch.device("meta"):
        model = lab.model(tied=True)
    report = convert_to_fp8(model, lab.settings(fp8_recipe="rowwise", fp8_emulate=True), lab.cpu)
    assert len(report.converted) == 11
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.embed.weight


def test_layer_with_two_names_stays_one(lab: Any) -> None:
    model = lab.model()
    model.layers[1].q_proj = model.layers[0].q_proj
    convert_to_fp8(model, lab.settings(fp8_recipe="rowwise", fp8_emulate=True), lab.cpu)
    assert isinstance(model.layers[0].q_proj, fp8_class())
    assert model.layers[1].q_proj is model.layers[0].q_proj


def test_output_layer_that_is_not_known_is_said(lab: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    report = convert_to_fp8(model, lab.settings(fp8_recipe="rowwise", fp8_emulate=True), lab.cpu)
    assert len(report.converted) == 2
    assert "the model has no get_output_embeddings()" in str(report)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_device_without_fp8_is_refused(lab: Any, recipe: str) -> None:
    message = rf"fp8_recipe='{recipe}' needs an NVIDIA GPU .* 8\.9.*found device 'cpu'\. .*fp8_emulate"
    with pytest.raises(ConfigurationError, match=message):
        convert_to_fp8(lab.model(), lab.settings(fp8_recipe=recipe), lab.cpu)
    assert lacks_fp8(torch.device("xpu")) == "device 'xpu'"


def test_nothing_to_convert_is_refused(lab: Any) -> None:
    args = lab.settings(fp8_recipe="tensorwise", fp8_emulate=True, fp8_exclude=("layers",))
    message = r"cannot convert any linear layer \(14 excluded by 'layers'; 1 the output layer\)"
    with pytest.raises(ConfigurationError, match=message):
        convert_to_fp8(lab.model(), args, lab.cpu)


def test_second_conversion_is_refused(lab: Any) -> None:
    args = lab.settings(fp8_recipe="tensorwise", fp8_emulate=True)
    model = lab.model()
    convert_to_fp8(model, args, lab.cpu)
    with pytest.raises(ConfigurationError, match=r"'layers\.0\.q_proj' is a Float8Linear of torchao already"):
        convert_to_fp8(model, args, lab.cpu)
