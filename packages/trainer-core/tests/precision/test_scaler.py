"""Loss scaling: exact gradients, skipped overflows, state, several optimizers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_core import ConfigurationError, TrainingArguments
from trainer_core.precision import LossScaler, autocast, build_scaler

MakeSettings = Callable[..., TrainingArguments]
CPU = torch.device("cpu")


class TwoOptimizers:
    """Two optimizers that are stepped as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_scaler_only_for_fp16(settings: MakeSettings, regression: Any) -> None:
    assert build_scaler(settings(), regression.model, CPU) is None
    assert build_scaler(settings(mixed_precision="bf16"), regression.model, CPU) is None
    assert isinstance(build_scaler(settings(mixed_precision="fp16"), regression.model, CPU), LossScaler)


def test_float16_weights_are_refused(settings: MakeSettings, regression: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"mixed_precision='fp16' needs weights in float32.*0\.weight"
    ):
        build_scaler(settings(mixed_precision="fp16"), regression.model.half(), CPU)


def test_frozen_float16_weights_are_fine(settings: MakeSettings, regression: Any) -> None:
    regression.model[0].half().requires_grad_(False)
    assert build_scaler(settings(mixed_precision="fp16"), regression.model, CPU) is not None


def test_steps_equal_those_without_scaling(regression: Any) -> None:
    """The factor is a power of two: in float32 nothing is rounded by it."""
    plain = copy.deepcopy(regression)
    adamw = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
    scaled = torch.optim.AdamW(regression.model.parameters(), lr=1e-2)
    scaler = LossScaler("cpu", growth_interval=3)
    for _ in range(8):
        plain.loss().backward()
        adamw.step()
        adamw.zero_grad()
        scaler.scale(regression.loss()).backward()
        scaler.unscale_(scaled)
        assert scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    assert same(weights(plain.model), weights(regression.model))
    assert scaler.get_scale() == 2.0**18, "eight steps, doubled after each three"


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_halves_the_scale(regression: Any, fused: bool) -> None:
    optimizer = torch.optim.AdamW(regression.model.parameters(), lr=1e-2, fused=fused)
    scaler = LossScaler("cpu")
    before = weights(regression.model)
    scaler.scale(regression.loss()).backward()
    regression.model[0].weight.grad[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is False
    scaler.update()
    assert same(before, weights(regression.model))
    assert not optimizer.state, "no moments, no step count"
    assert scaler.get_scale() == 2.0**15
    assert (scaler.skipped_in_a_row, scaler.skipped_steps) == (1, 1)

    optimizer.zero_grad()
    scaler.scale(regression.loss()).backward()
    assert scaler.step(optimizer) is True
    scaler.update()
    assert not same(before, weights(regression.model))
    assert (scaler.skipped_in_a_row, scaler.skipped_steps) == (0, 1)


def test_overflow_in_one_optimizer_skips_all(regression: Any) -> None:
    first, second = regression.model[0].parameters(), regression.model[2].parameters()
    optimizer = TwoOptimizers(torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.1))
    scaler = LossScaler("cpu")
    before = weights(regression.model)
    scaler.scale(regression.loss()).backward()
    regression.model[2].bias.grad.fill_(torch.nan)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is False
    scaler.update()
    assert same(before, weights(regression.model))


def test_optimizers_one_by_one_are_refused(regression: Any) -> None:
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in regression.model[::2]]
    scaler = LossScaler("cpu")
    scaler.scale(regression.loss()).backward()
    scaler.unscale_(optimizers[0])
    with pytest.raises(RuntimeError, match="Unite several optimizers"):
        scaler.unscale_(optimizers[1])
    with pytest.raises(RuntimeError, match="Unite several optimizers"):
        scaler.step(optimizers[1])


def test_unscaled_gradients_are_those_of_the_loss(regression: Any) -> None:
    regression.loss().backward()
    expected = [parameter.grad.clone() for parameter in regression.model.parameters()]
    regression.model.zero_grad()
    scaler = LossScaler("cpu")
    scaler.scale(regression.loss()).backward()
    scaler.unscale_(torch.optim.SGD(regression.model.parameters(), lr=0.1))
    found = [parameter.grad for parameter in regression.model.parameters()]
    torch.testing.assert_close(found, expected)


def test_state_survives_json_and_goes_on(regression: Any) -> None:
    def steps(scaler: LossScaler, setup: Any, count: int) -> None:
        optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
        for number in range(count):
            scaler.scale(setup.loss()).backward()
            if number == 1:
                setup.model[0].bias.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    scaler = LossScaler("cpu", growth_interval=4)
    steps(scaler, regression, 5)
    state = json.loads(json.dumps(scaler.state_dict()))
    other = LossScaler("cpu")
    other.load_state_dict(state | {"skipped_steps": torch.tensor(state["skipped_steps"])})
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(TypeError, match="a number of skipped steps is a list"):
        LossScaler("cpu").load_state_dict(state | {"skipped_steps": [1]})
    twin = copy.deepcopy(regression)
    steps(scaler, regression, 7)
    steps(other, twin, 7)
    assert other.state_dict() == scaler.state_dict()
    assert same(weights(regression.model), weights(twin.model))


def test_endless_overflow_is_noticed(regression: Any) -> None:
    optimizer = torch.optim.SGD(regression.model.parameters(), lr=0.1)
    scaler = LossScaler("cpu")
    regression.targets.fill_(torch.nan)
    for number in range(25):
        assert not scaler.is_hopeless, number
        scaler.scale(regression.loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.is_hopeless


def test_model_trains_in_float16_on_the_cpu(settings: MakeSettings, regression: Any) -> None:
    args = settings(mixed_precision="fp16")
    scaler = build_scaler(args, regression.model, CPU)
    assert scaler is not None
    optimizer = torch.optim.AdamW(regression.model.parameters(), lr=1e-2)
    first = regression.loss().item()
    made = 0
    for _ in range(60):
        with autocast(args, "cpu"):
            loss = regression.loss()
        scaler.scale(loss).backward()
        made += scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert made + scaler.skipped_steps == 60
    assert made > 40
    assert regression.loss().item() < 0.3 * first
