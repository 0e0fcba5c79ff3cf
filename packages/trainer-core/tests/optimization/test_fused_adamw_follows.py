"""FusedAdamW keeps lists of what it steps; what a user exchanges counts from the next step on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trainer_core.optimization import FusedAdamW, OptimizerInBackward

Exchange = Callable[[Optimizer, list[nn.Parameter]], object]
Make = Callable[[list[dict[str, object]]], Optimizer]


def zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


EXCHANGES: dict[str, Exchange] = {
    "state cleared": lambda o, p: o.state.clear(),
    "state replaced": lambda o, p: setattr(o, "state", defaultdict(dict)),
    "state of one popped": lambda o, p: o.state.pop(p[0]),
    "state of one replaced": lambda o, p: o.state.update({p[0]: zeros(o.state[p[0]])}),
    "state of one emptied": lambda o, p: o.state[p[0]].clear(),
    "group popped": lambda o, p: o.param_groups.pop(),
    "groups replaced": lambda o, p: setattr(o, "param_groups", [{**g, "lr": 0.5} for g in o.param_groups]),
    "group exchanged": lambda o, p: o.param_groups.__setitem__(1, {**o.param_groups[1], "lr": 0.5}),
    "parameter appended": lambda o, p: o.param_groups[0]["params"].append(p[2]),
    "parameters cleared": lambda o, p: o.param_groups[0]["params"].clear(),
    "parameter exchanged": lambda o, p: o.param_groups[0]["params"].__setitem__(0, p[2]),
    "decay into the gradient": lambda o, p: o.param_groups[0].update(decoupled_weight_decay=False),
    "one group unfused": lambda o, p: o.param_groups[0].update(fused=False),
    "data replaced": lambda o, p: setattr(p[0], "data", torch.ones(3)),
}


def stepped(make: Make, exchange: Exchange) -> tuple[list[nn.Parameter], Optimizer]:
    """Three parameters, two of them in groups; the exchange comes before the sixth of nine steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, generator=generator)) for _ in range(3)]
    optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:2]}])
    for step in range(9):
        for parameter in parameters:
            parameter.grad = torch.randn(3, generator=generator)
        if step == 5:
            exchange(optimizer, parameters)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("name", EXCHANGES)
def test_follows_as_torch_does(name: str) -> None:
    ours, own = stepped(lambda groups: FusedAdamW(groups, lr=0.1), EXCHANGES[name])
    theirs, torchs = stepped(lambda groups: AdamW(groups, lr=0.1, fused=True), EXCHANGES[name])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        here, there = own.state.get(one, {}), torchs.state.get(other, {})
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in here)


def test_decay_into_the_gradient_works_in_backward_too() -> None:
    def trained(make: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]) -> nn.Parameter:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = make([("weight", weight)])
        for group in optimizer.param_groups:
            group["decoupled_weight_decay"] = False
        for step in range(4):
            optimizer.zero_grad()
            weight.pow(2).sum().mul(step + 1).backward()
            optimizer.step()
        return weight

    in_backward = trained(lambda named: OptimizerInBackward(named, FusedAdamW))
    assert torch.equal(in_backward, trained(lambda named: AdamW(named, fused=True)))
