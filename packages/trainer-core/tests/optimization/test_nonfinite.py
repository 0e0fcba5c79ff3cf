"""Steps with a gradient that is not finite: gated on the device, counted, found out at the next look."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core import clip_grad_norm_
from trainer_core.optimization import Multiopt, OptimizerInBackward
from trainer_core.update import NonFiniteGuard

CPU = torch.device("cpu")
BAD = {"nan": float("nan"), "inf": float("inf"), "minus inf": -float("inf")}


def fused_adamw(params):
    return AdamW(params, fused=True)


def multi(params):
    params = list(params)
    return Multiopt([fused_adamw(params[:3]), SGD(params[3:], lr=0.1, fused=True)])


def multi_mixed(params):
    params = list(params)
    matrices = [p for p in params if p.ndim == 2]
    return Multiopt([fused_adamw([p for p in params if p.ndim != 2]), Muon(matrices)])


def with_an_unfused_group(params):
    params = list(params)
    return fused_adamw([{"params": params[:3]}, {"params": params[3:], "fused": False}])


GATED = {
    "AdamW": fused_adamw,
    "Adam": lambda params: Adam(params, fused=True),
    "SGD": lambda params: SGD(params, lr=0.1, fused=True),
    "several": multi,
}
READ = {
    "AdamW": lambda params: AdamW(params, foreach=False),
    "AdamW with an unfused group": with_an_unfused_group,
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "several": multi_mixed,
}


def fused_adagrad(params):
    return Adagrad(params, fused=True)


# The fused Adagrad of torch 2.11 has no flag; later ones announce theirs as the others do.
KNOWS_THE_FLAG = hasattr(fused_adagrad([torch.zeros(1, requires_grad=True)]), "_step_supports_amp_scaling")
(GATED if KNOWS_THE_FLAG else READ)["Adagrad"] = fused_adagrad
ALL = {**{f"gated {k}": v for k, v in GATED.items()}, **{f"read {k}": v for k, v in READ.items()}}


class CountReads(TorchDispatchMode):
    """Counts how often the host looks at a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def assert_bits(left, right):
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        assert torch.equal(value, right[0][name]), name
    for index, state in left[1].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[1][index][key])), (index, key)


def one_step(model, guard, loss_of, step, bad=None, max_norm=1.0):
    model.zero_grad()
    loss_of(model, step).backward()
    if bad is not None:
        model.head.weight.grad[0, 0] = bad
    norm = clip_grad_norm_(model.parameters(), max_norm)
    guard.observe(norm)
    guard.step()
    return norm


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("at", [1, 4])
def test_skip_leaves_one_step_out_to_the_last_bit(net, loss_of, kind, bad, at):
    models = net(), net()
    guards = [NonFiniteGuard("skip", CPU, ALL[kind](model.parameters())) for model in models]
    for step in range(1, 8):
        if step == at:
            before = snapshot(models[0], guards[0].optimizer)
            one_step(models[0], guards[0], loss_of, step, bad)
            if at > 1:
                assert_bits(before, snapshot(models[0], guards[0].optimizer))
            continue
        for model, guard in zip(models, guards, strict=True):
            one_step(model, guard, loss_of, step)
    assert_bits(*(snapshot(model, guard.optimizer) for model, guard in zip(models, guards, strict=True)))
    report = guards[0].check(7)
    assert (report.bad, report.first_step, report.skipped) == (True, at, 1)
    assert guards[0].total_skipped == 1
    again = guards[0].check(7)
    assert (again.bad, again.first_step, again.skipped) == (False, -1, 0)


@pytest.mark.parametrize("policy", ["stop", "raise"])
@pytest.mark.parametrize("kind", ALL)
def test_stop_freezes_everything_from_the_first_bad_step_on(net, loss_of, policy, kind):
    model = net()
    guard = NonFiniteGuard(policy, CPU, ALL[kind](model.parameters()))
    for step in range(1, 5):
        one_step(model, guard, loss_of, step)
    assert not guard.check(4).bad
    before = snapshot(model, guard.optimizer)
    for step in range(5, 9):
        one_step(model, guard, loss_of, step, bad=float("nan") if step == 6 else None)
        if step == 5:
            before = snapshot(model, guard.optimizer)
    assert_bits(before, snapshot(model, guard.optimizer))
    report = guard.check(8)
    assert (report.bad, report.first_step, report.skipped) == (True, 6, 0)
    assert "step 6 is not finite, and neither it nor any later" in report.message()
    assert guard.check(8) == report


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("kind", GATED)
def test_the_host_reads_nothing_per_step(net, loss_of, policy, kind):
    model = net()
    guard = NonFiniteGuard(policy, CPU, GATED[kind](model.parameters()))
    for step in range(1, 3):
        one_step(model, guard, loss_of, step)
    with CountReads() as counted:
        for step in range(3, 6):
            one_step(model, guard, loss_of, step, bad=float("inf") if step == 4 else None)
    assert counted.reads == 0


@pytest.mark.parametrize("kind", READ)
def test_others_cost_one_read_per_step_which_is_said_once(net, loss_of, kind, caplog):
    model = net()
    with caplog.at_level(logging.INFO):
        guard = NonFiniteGuard("stop", CPU, READ[kind](model.parameters()))
        for step in range(1, 3):
            norm = one_step(model, guard, loss_of, step)
    assert sum("cannot skip a step on the device" in record.message for record in caplog.records) == 1
    with CountReads() as own:
        guard.optimizer.step()
    with CountReads() as guarded:
        guard.observe(norm)
        guard.step()
    assert guarded.reads == own.reads + 1


def test_several_skips_in_one_interval(net, loss_of):
    model = net()
    guard = NonFiniteGuard("skip", CPU, fused_adamw(model.parameters()))
    for step in range(1, 11):
        bad = float("nan") if step in (3, 7, 8) else None
        one_step(model, guard, loss_of, step, bad)
    report = guard.check(10)
    assert (report.first_step, report.skipped) == (3, 3)
    one_step(model, guard, loss_of, 11, float("inf"))
    assert guard.check(11).first_step == 11
    assert guard.total_skipped == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_norms(net, dtype):
    guard = NonFiniteGuard("stop", CPU, fused_adamw(net().parameters()))
    for value in (0.0, 1e-40, torch.finfo(torch.float32).max / 2):
        guard.observe(torch.tensor(value, dtype=dtype))
    assert not guard.check(3).bad


def test_in_backward_is_found_out_afterwards(net, loss_of):
    model = net()
    optimizer = OptimizerInBackward(model.named_parameters(), fused_adamw)
    guard = NonFiniteGuard("stop", CPU, optimizer)
    for step in range(1, 5):
        factor = float("nan") if step == 3 else 1.0
        (loss_of(model, step) * factor).backward()
        guard.observe(optimizer.take_norm())
        guard.step()
    report = guard.check(4)
    assert (report.bad, report.first_step, optimizer.steps) == (True, 3, 4)
    assert "it was applied" in report.message(updated=True)
