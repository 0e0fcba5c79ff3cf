"""An optimizer that steps during backward: the same curve, the same checkpoints, gradients gone at once."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

from checkpoint_core import OptimizerState
from trainer_core import ConfigurationError, clip_grad_norm_
from trainer_core.optimization import (
    Multiopt,
    OptimizerInBackward,
    ParameterGroups,
    build_adamw,
)


def ordinary(factory, model):
    optimizer = factory(list(model.named_parameters()))
    return optimizer, CosineAnnealingLR(optimizer, 40)


def in_backward(factory, model):
    optimizer = OptimizerInBackward(model.named_parameters(), factory)
    return optimizer, CosineAnnealingLR(optimizer, 40)


def train(model, optimizer, scheduler, loss_of, steps, first=0):
    curve = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        if isinstance(optimizer, OptimizerInBackward):
            assert all(p.grad is None for p in model.parameters())
            norm = optimizer.take_norm()
        else:
            norm = clip_grad_norm_(model.parameters(), None)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        curve.append((loss.item(), norm.item()))
    return curve


FACTORIES = {
    "built-in": None,
    "torch AdamW": lambda named: AdamW(named, lr=1e-2, weight_decay=0.1),
    "SGD": lambda named: SGD(named, lr=0.1, momentum=0.9),
}


@pytest.fixture(params=FACTORIES)
def factory(request, arguments):
    return FACTORIES[request.param] or partial(build_adamw, arguments())


@pytest.mark.parametrize("tied", [False, True])
def test_same_curve_as_ordinary(net, loss_of, factory, tied):
    models = net(tied=tied), net(tied=tied)
    expected = train(models[0], *ordinary(factory, models[0]), loss_of, 25)
    fused = train(models[1], *in_backward(factory, models[1]), loss_of, 25)
    for ours, theirs in zip(fused, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "kinds", [(ordinary, in_backward), (in_backward, ordinary), (in_backward, in_backward)]
)
def test_switch_on_resume(net, loss_of, factory, kinds):
    before, after = kinds
    model, resumed = net(), net()
    optimizer, scheduler = before(factory, model)
    train(model, optimizer, scheduler, loss_of, 6)
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy((OptimizerState(optimizer, model).state_dict(), scheduler.state_dict()))
    expected = train(model, optimizer, scheduler, loss_of, 6, 6)
    again, schedule = after(factory, resumed)
    train(resumed, again, schedule, loss_of, 2)
    resumed.load_state_dict(weights)
    OptimizerState(again, resumed).load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    for ours, theirs in zip(train(resumed, again, schedule, loss_of, 6, 6), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert OptimizerState(again, resumed).state_dict()["state"].keys() == saved[0]["state"].keys()


def test_groups_and_frozen_parameters(net, loss_of, arguments):
    models = net(), net()
    for model in models:
        model.embed.requires_grad_(False)
    groups = ParameterGroups({"head.*": {"lr": 1e-3}, "layers.0.*": {"weight_decay": 0.5}})

    def factory(named):
        return groups.build(arguments(), named)

    expected = train(models[0], *ordinary(factory, models[0]), loss_of, 10)
    fused = train(models[1], *in_backward(factory, models[1]), loss_of, 10)
    assert [loss for loss, _ in fused] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert torch.equal(models[1].embed.weight, net().embed.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights_with_activation_checkpointing(net, loss_of, factory, reentrant):
    """A weight that is used twice has its whole gradient before its hook runs."""

    def checkpointed():
        model = net(tied=True)
        shared = model.layers[0]["linear"].weight
        model.layers[1]["linear"].weight = shared
        plain = model.block
        model.block = lambda layer, hidden: checkpoint(plain, layer, hidden, use_reentrant=reentrant)
        return model

    models = checkpointed(), checkpointed()
    expected = train(models[0], *ordinary(factory, models[0]), loss_of, 6)
    if reentrant:
        with pytest.raises(ConfigurationError, match=r"linear\.weight got a second one"):
            train(models[1], *in_backward(factory, models[1]), loss_of, 1)
        return
    fused = train(models[1], *in_backward(factory, models[1]), loss_of, 6)
    for ours, theirs in zip(fused, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_second_backward_is_refused_and_can_be_dropped(net, loss_of, factory):
    model = net()
    optimizer, _ = in_backward(factory, model)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigurationError, match="got a second one"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.steps == 1


def test_gradients_are_freed_one_by_one(net, loss_of, factory):
    model = net()
    in_backward(factory, model)
    alive = []

    def count(_):
        alive.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    loss_of(model, 0).backward()
    assert alive == [0] * len(list(model.parameters()))


def test_hooks_can_be_taken_off(net, loss_of, factory):
    model = net()
    optimizer, _ = in_backward(factory, model)
    optimizer.remove()
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is not None for p in model.parameters())


class Counting(Optimizer):
    """Keeps its step count in the group, where a step per parameter counts too often."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1


def test_what_cannot_work_is_refused(net, loss_of, factory):
    model = net()
    with pytest.raises(ConfigurationError, match="works with one optimizer"):
        OptimizerInBackward(model.named_parameters(), lambda named: Multiopt([factory(named)]))
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        OptimizerInBackward(net().requires_grad_(False).named_parameters(), factory)
    OptimizerInBackward(model.named_parameters(), Counting)
    with pytest.raises(ConfigurationError, match=r"Counting, which counts in its groups \(k\)"):
        loss_of(model, 0).backward()
    optimizer, _ = in_backward(factory, net())
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0.0)
