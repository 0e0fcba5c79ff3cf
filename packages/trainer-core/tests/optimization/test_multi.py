"""Several optimizers as one: schedules, checkpoints and loss scaling."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
)
from dist_env import StaticDistributedEnvironment
from trainer_core import ConfigurationError
from trainer_core.optimization import Multiopt, build_optimizer


def muon(params):
    return Muon(params, lr=0.02, momentum=0.9)


def fused_sgd(params):
    return SGD(params, lr=0.1, fused=True)


def matrices_by(factory):
    return {r"re:layers\.\d\.linear\.weight": {"factory": factory}, "*.bias": {"lr": 1e-3}}


def train(model, optimizer, loss_of, steps, first=0, scheduler=None):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def assert_same(left, right):
    for (name, one), other in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name


def test_same_as_the_members_by_hand(net, loss_of, arguments):
    model, hand = net(), net()
    optimizer = build_optimizer(arguments(), model, groups=matrices_by(muon))
    assert [type(member) for member in optimizer.optimizers] == [AdamW, Muon]
    matrices = [layer["linear"].weight for layer in hand.layers]
    own = {id(p) for p in matrices}
    biases = [p for name, p in hand.named_parameters() if name.endswith(".bias")]
    own |= {id(p) for p in biases}
    rest = [p for p in hand.parameters() if id(p) not in own]
    decaying = [hand.embed.weight, hand.head.weight]
    kept = [p for p in rest if all(p is not other for other in decaying)]
    members = [
        AdamW(
            [
                {"params": decaying, "weight_decay": 0.1},
                {"params": kept, "weight_decay": 0.0},
                {"params": biases, "weight_decay": 0.0, "lr": 1e-3},
            ],
            lr=1e-2,
            fused=True,
        ),
        Muon(matrices, lr=0.02, momentum=0.9),
    ]
    schedules = [CosineAnnealingLR(member, 20) for member in members]
    scheduler = CosineAnnealingLR(optimizer, 20)
    for step in range(12):
        train(model, optimizer, loss_of, 1, step, scheduler)
        hand.zero_grad()
        loss_of(hand, step).backward()
        for member, schedule in zip(members, schedules, strict=True):
            member.step()
            schedule.step()
    assert_same(model, hand)
    assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()
    assert scheduler.get_last_lr() == [rate for schedule in schedules for rate in schedule.get_last_lr()]


@pytest.mark.parametrize("fresh", [True, False])
def test_resume_from_a_real_checkpoint_is_exact(net, loss_of, arguments, tmp_path: Path, fresh):
    def parts(model):
        optimizer = build_optimizer(arguments(), model, groups=matrices_by(muon))
        return optimizer, CosineAnnealingLR(optimizer, 30)

    class Provider:
        def __init__(self, model, optimizer, scheduler):
            stateful = {
                "model": ModelState(model),
                "optimizer": OptimizerState(optimizer, model),
                "scheduler": scheduler,
            }
            self.components = [
                StateComponent(key=key, stateful=part, sharing_pattern=SharingPattern.GLOBAL)
                for key, part in stateful.items()
            ]

        def get_state_components(self):
            return self.components

        def get_process_groups(self):
            return {}

    def manager(*given):
        config = CheckpointConfig(output_dir=str(tmp_path))
        return CheckpointManager(
            config, dist=StaticDistributedEnvironment(), stateful_provider=Provider(*given)
        )

    model = net()
    optimizer, scheduler = parts(model)
    train(model, optimizer, loss_of, 5, scheduler=scheduler)
    manager(model, optimizer, scheduler).save_checkpoint(5)
    expected = train(model, optimizer, loss_of, 5, 5, scheduler)
    resumed = net()
    again, schedule = parts(resumed)
    if not fresh:
        train(resumed, again, loss_of, 2, scheduler=schedule)
    assert manager(resumed, again, schedule).load_checkpoint() is not None
    assert train(resumed, again, loss_of, 5, 5, schedule) == expected
    assert_same(model, resumed)


def test_state_dict_round_trip_and_copy(net, loss_of, arguments):
    model = net()
    optimizer = build_optimizer(arguments(), model, groups=matrices_by(muon))
    train(model, optimizer, loss_of, 3)
    packed = copy.deepcopy(optimizer.state_dict())
    indices = [index for group in packed["param_groups"] for index in group["params"]]
    assert sorted(indices) == list(range(len(list(model.parameters()))))
    assert len(optimizer.state) == len(packed["state"]) == len(indices)
    other = net()
    again = build_optimizer(arguments(), other, groups=matrices_by(muon))
    again.load_state_dict(packed)
    other.load_state_dict(model.state_dict())
    train(model, optimizer, loss_of, 3, 3)
    train(other, again, loss_of, 3, 3)
    assert_same(model, other)
    revived = pickle.loads(pickle.dumps(again))
    assert [type(member) for member in revived.optimizers] == [AdamW, Muon]
    with pytest.raises(ValueError, match="parameter groups"):
        again.load_state_dict({"state": {}, "param_groups": packed["param_groups"][:1]})


def test_state_of_three_members_goes_back_to_its_own(net, loss_of):
    def three(model):
        return Multiopt([AdamW(layer.parameters(), fused=True) for layer in (model.embed, *model.layers)])

    model, other = net(), net()
    optimizer, again = three(model), three(other)
    train(model, optimizer, loss_of, 3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(optimizer.state, again.state, strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], again.state[two]["exp_avg"])


def test_hooks_closure_and_groups(net, loss_of, arguments):
    model = net()
    optimizer = build_optimizer(arguments(), model, groups=matrices_by(muon))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("loading"))

    def closure():
        loss = loss_of(model, 0)
        loss.backward()
        calls.append("loss")
        return loss

    assert optimizer.step(closure) > 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "loss", "post", "saved", "loading"]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="which of its optimizers"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("factory", [fused_sgd, muon], ids=["all heed the flag", "one does not"])
@pytest.mark.parametrize("unscale", [False, True])
def test_one_overflow_skips_all_members(net, loss_of, arguments, factory, unscale):
    model, plain = net(), net()
    optimizer = build_optimizer(arguments(), model, groups=matrices_by(factory))
    reference = build_optimizer(arguments(), plain, groups=matrices_by(factory))
    assert optimizer._step_supports_amp_scaling is (factory is fused_sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if step == 3:
            model.embed.weight.grad[0, 0] = float("inf")  # a parameter of the first member only
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        else:
            train(plain, reference, loss_of, 1, step)
    assert scaler.get_scale() == 512.0
    assert not hasattr(optimizer, "found_inf")
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_a_parameter_of_two_members_is_refused(net):
    model = net()
    with pytest.raises(ConfigurationError, match=r"AdamW and SGD.*shape \[11, 8\]"):
        Multiopt([AdamW(model.parameters()), SGD([model.embed.weight], lr=0.1)])
    with pytest.raises(ConfigurationError, match="makes no optimizer"):
        Multiopt([])
