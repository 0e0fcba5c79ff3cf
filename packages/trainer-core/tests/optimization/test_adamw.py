"""The built-in AdamW: torch's numbers, its state, and what does not decay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from checkpoint_core import OptimizerState
from trainer_core import ConfigurationError
from trainer_core.optimization import build_adamw, decay_exemptions


def train(model, optimizer, loss_of, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def assert_close(one, other, exactly):
    tolerance = 0.0 if exactly else 1e-6
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_same(left, right, exactly):
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert_close(one, other, exactly)


def assert_same_state(left, right, model_left, model_right, exactly):
    one, other = (
        OptimizerState(left, model_left).state_dict(),
        OptimizerState(right, model_right).state_dict(),
    )
    assert one["parameters"].keys() == other["parameters"].keys()
    assert one["state"].keys() == other["state"].keys()
    for name, values in one["state"].items():
        for key, value in values.items():
            assert_close(value, other["state"][name][key], exactly)


def test_fused_where_every_parameter_has_a_kernel(net, arguments):
    model = net()
    assert all(group["fused"] for group in build_adamw(arguments(), model.named_parameters()).param_groups)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    groups = build_adamw(arguments(), model.named_parameters()).param_groups
    # False would keep torch from choosing `foreach` too.
    assert [group["fused"] for group in groups] == [None, None]


@pytest.mark.parametrize("saved_fused", [True, False])
@pytest.mark.parametrize("loaded_fused", [True, False])
def test_checkpoints_go_between_fused_and_not(net, loss_of, arguments, saved_fused, loaded_fused):
    def make(fused, model):
        return (
            build_adamw(arguments(), model.named_parameters()) if fused else AdamW(groups_of(model), lr=1e-2)
        )

    whole = net()
    optimizer = make(saved_fused, whole)
    train(whole, optimizer, loss_of, 4)
    resumed = net()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    saved = copy.deepcopy(OptimizerState(optimizer, whole).state_dict())
    again = make(loaded_fused, resumed)
    train(resumed, again, loss_of, 2)  # it has lived before the load
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    OptimizerState(again, resumed).load_state_dict(saved)
    train(whole, optimizer, loss_of, 3, first=4)
    train(resumed, again, loss_of, 3, first=4)
    exactly = saved_fused == loaded_fused
    assert_same(whole, resumed, exactly)
    assert_same_state(optimizer, again, whole, resumed, exactly)


def test_moments_of_bfloat16_weights_keep_their_dtype(net, loss_of, arguments):
    model = net().to(torch.bfloat16)
    optimizer = build_adamw(arguments(), model.named_parameters())
    train(model, optimizer, loss_of, 3)
    again = build_adamw(arguments(), model.named_parameters())
    OptimizerState(again, model).load_state_dict(OptimizerState(optimizer, model).state_dict())
    train(model, again, loss_of, 2, first=3)
    for parameter in model.parameters():
        state = again.state[parameter]
        assert state["step"] == 5
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


def test_biases_and_norms_do_not_decay(net, arguments):
    model = net()
    exempt = decay_exemptions(model)
    optimizer = build_adamw(arguments(), model.named_parameters(), exempt=exempt)
    decaying, kept = optimizer.param_groups
    assert decaying["param_names"] == [
        "embed.weight",
        "layers.0.linear.weight",
        "layers.1.linear.weight",
        "head.weight",
    ]
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert set(kept["param_names"]) == exempt.keys()
    assert exempt["layers.0.plane.weight"] == "of PlaneNorm"
    assert exempt["layers.0.norm.bias"] == "of LayerNorm"
    assert exempt["layers.0.linear.bias"] == "bias"


def test_groups_are_the_same_without_decay_so_that_a_resume_may_switch_it(net, arguments):
    groups = build_adamw(arguments(weight_decay=0.0), net().named_parameters()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


def test_nothing_trainable_is_said(net, arguments):
    with pytest.raises(ConfigurationError, match=r"model='frozen'.*requires_grad"):
        build_adamw(arguments(), net().requires_grad_(False).named_parameters())
