"""The built-in AdamW: torch's numbers, its state, and what does not decay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from checkpoint_core import OptimizerState
from trainer_core import ConfigurationError
from trainer_core.optimization import FusedAdamW, build_adamw, decay_exemptions


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


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other), name


def assert_same_state(left, right, model_left, model_right):
    one, other = (
        OptimizerState(left, model_left).state_dict(),
        OptimizerState(right, model_right).state_dict(),
    )
    assert one["parameters"] == other["parameters"]
    assert one["state"].keys() == other["state"].keys()
    for name, values in one["state"].items():
        for key, value in values.items():
            assert torch.equal(value, other["state"][name][key]), (name, key)


def test_bitwise_the_same_as_torch(net, loss_of):
    ours, theirs = net(), net()
    own, torchs = FusedAdamW(groups_of(ours), lr=1e-2), AdamW(groups_of(theirs), lr=1e-2, fused=True)
    for start in (0, 10):
        train(ours, own, loss_of, 10, start)
        train(theirs, torchs, loss_of, 10, start)
        for group in (*own.param_groups, *torchs.param_groups):
            group["lr"] = 3e-3
            group["betas"] = (0.8, 0.95)
    assert_same(ours, theirs)
    assert_same_state(own, torchs, ours, theirs)


def test_takes_the_fast_path_from_the_second_step_on(net, loss_of, monkeypatch):
    model = net()
    optimizer = FusedAdamW(model.parameters())
    slow = []
    monkeypatch.setattr(FusedAdamW, "_step_as_torch_does", _counted(slow))
    train(model, optimizer, loss_of, 5)
    assert len(slow) == 1
    steps = [optimizer.state[p]["step"] for p in model.parameters()]
    assert all(step == 5 for step in steps)
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1


def _counted(calls):
    original = FusedAdamW._step_as_torch_does

    def call(self):
        calls.append(1)
        original(self)

    return call


@pytest.mark.parametrize("disturb", ["missing", "returning", "replaced", "amsgrad", "tensor"])
def test_same_as_torch_when_something_is_unusual(net, loss_of, disturb):
    models = net(), net()
    optimizers = FusedAdamW(groups_of(models[0]), lr=1e-2), AdamW(groups_of(models[1]), lr=1e-2, fused=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, loss_of, 3)
        for step in range(3, 9):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            odd = step in (4, 5)
            if disturb == "missing" and odd:
                model.head.weight.grad = None
            elif disturb == "returning" and step < 7:
                model.layers[0]["linear"].bias.grad = None
            elif disturb == "replaced" and step == 4:
                state = optimizer.state[model.head.weight]
                state["step"] = state["step"].clone()
                state["exp_avg"] = state["exp_avg"].clone()
            elif disturb == "amsgrad" and step == 6:
                for state in optimizer.state.values():
                    state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
                for group in optimizer.param_groups:
                    group["amsgrad"] = True
            elif disturb == "tensor" and step == 5:
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(2e-3)
            optimizer.step()
    assert_same(*models)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(optimizers[0].state[one]["step"], optimizers[1].state[other]["step"])


def test_step_hooks_run_once_per_step(net, loss_of):
    model = net()
    AdamW(net().parameters())  # from now on torch's own class calls hooks as well
    optimizer = FusedAdamW(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, loss_of, 2)
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("saved_by", [FusedAdamW, AdamW])
@pytest.mark.parametrize("loaded_by", [FusedAdamW, AdamW])
def test_checkpoints_are_those_of_torch(net, loss_of, saved_by, loaded_by):
    def make(cls, model):
        return cls(groups_of(model), lr=1e-2, **({"fused": True} if cls is AdamW else {}))

    whole = net()
    optimizer = make(saved_by, whole)
    train(whole, optimizer, loss_of, 4)
    resumed = net()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    saved = copy.deepcopy(OptimizerState(optimizer, whole).state_dict())
    again = make(loaded_by, resumed)
    train(resumed, again, loss_of, 2)  # it has lived before the load
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    OptimizerState(again, resumed).load_state_dict(saved)
    train(whole, optimizer, loss_of, 3, first=4)
    train(resumed, again, loss_of, 3, first=4)
    assert_same(whole, resumed)
    assert_same_state(optimizer, again, whole, resumed)


def test_moments_of_bfloat16_weights_keep_their_dtype(net, loss_of):
    model = net().to(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters())
    train(model, optimizer, loss_of, 3)
    again = FusedAdamW(model.parameters())
    OptimizerState(again, model).load_state_dict(OptimizerState(optimizer, model).state_dict())
    train(model, again, loss_of, 2, first=3)
    assert all(again.state[p]["step"] == 5 for p in model.parameters())


def test_closure_and_group_added_later(net, loss_of):
    models = net(), net()
    for model, cls in zip(models, (FusedAdamW, AdamW), strict=True):
        optimizer = cls(model.layers.parameters(), lr=1e-2, **({"fused": True} if cls is AdamW else {}))

        def closure(optimizer=optimizer, model=model):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        assert losses[2] < losses[0]
        optimizer.add_param_group({"params": [model.embed.weight]})
        train(model, optimizer, loss_of, 3)
    assert_same(*models)


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
