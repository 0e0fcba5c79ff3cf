"""Optimizer state by parameter name."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from checkpoint_core import CheckpointError, OptimizerState
from checkpoint_core.loading import StoredState, plan_restore

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.optim.Optimizer:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
    return optimizer


def test_files_are_keyed_by_parameter_name(store: Callable[..., Path], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = stepped(model, torch.optim.AdamW(groups, lr=0.1))
    store(OptimizerState(optimizer, torch.compile(model)), "optimizer", tmp_path)
    document = json.loads((tmp_path / "optimizer.json").read_text())
    assert {
        name: (entry["shape"], entry["hyperparameters"]["lr"])
        for name, entry in document["parameters"].items()
    } == {
        "0.weight": ([2, 3], 0.5),
        "0.bias": ([2], 0.5),
        "1.weight": ([1, 2], 0.1),
        "1.bias": ([1], 0.1),
    }
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("0.weight.exp_avg"), optimizer.state[model[0].weight]["exp_avg"])
    assert {"1.bias.exp_avg_sq", "1.bias.step"} <= names


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), capturable=False, foreach=False),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adam(p, fused=True),
    ],
    ids=["amsgrad", "tensor-lr", "sgd", "adafactor", "rmsprop", "fused"],
)
def test_resumed_optimizer_goes_on_bit_for_bit(
    store: Callable[..., Path], tmp_path: Path, make: MakeOptimizer
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = stepped(model, make(model.parameters()))
    store(OptimizerState(optimizer, model), "optimizer", tmp_path)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    twin.load_state_dict(model.state_dict())
    resumed = make(twin.parameters())
    names = ["optimizer.json", "optimizer.safetensors"]
    stored = StoredState([tmp_path / name for name in names], "state")
    plan = plan_restore(OptimizerState(resumed, twin), stored)
    stored.fill(plan.fills, threads=2)
    plan.finish()
    stored.close()
    stepped(model, optimizer, 3)
    stepped(twin, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_order_of_parameters_may_change() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    state = OptimizerState(optimizer, model).state_dict()
    turned = torch.optim.AdamW(list(model.parameters())[::-1], lr=7.0)
    OptimizerState(turned, model).load_state_dict(state)
    assert turned.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_state_keeps_its_dtype() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = torch.randn(2, 2)
    optimizer.state[model.weight]["momentum_buffer"] = moments
    state = OptimizerState(optimizer, model).state_dict()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    OptimizerState(fresh, model).load_state_dict(state)
    assert torch.equal(fresh.state[model.weight]["momentum_buffer"], moments)


def test_tied_parameters_have_one_state() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    state = OptimizerState(stepped(model, torch.optim.Adam(model.parameters())), model).state_dict()
    assert set(state["state"]) == {"embed.weight"}


def test_what_does_not_fit_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = OptimizerState(stepped(model, torch.optim.Adam(model.parameters())), model).state_dict()

    with pytest.raises(CheckpointError, match=r"group 0, shape \[2, 3\], does not belong to the Linear"):
        OptimizerState(torch.optim.Adam(model.parameters()), nn.Linear(1, 1)).state_dict()
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: \['1.bias', '1.weight'\]"):
        OptimizerState(torch.optim.Adam(model[0].parameters()), model).load_state_dict(state)
    wider = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    with pytest.raises(CheckpointError, match=r"state of 1\.weight has shape \[1, 2\]"):
        OptimizerState(torch.optim.Adam(wider.parameters()), wider).load_state_dict(state)

    two_groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    two_groups[1]["lr"] = 0.5
    split = OptimizerState(torch.optim.Adam(two_groups), model).state_dict()
    merged = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"group 0 .* 0\.weight and 1\.weight, .* with different lr"):
        OptimizerState(merged, model).load_state_dict(split)


def test_an_entry_that_is_of_no_parameter_is_refused_by_name() -> None:
    class Averaging(torch.optim.SGD):
        """As PostLocalSGDOptimizer of torch, which counts the steps of its averager."""

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "step": 3}

    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"of the Averaging has the entry 'step' .* would be lost"):
        OptimizerState(Averaging(model.parameters()), model).state_dict()


def test_groups_may_change_while_their_settings_agree() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = OptimizerState(stepped(model, torch.optim.Adam(model.parameters(), lr=0.3)), model).state_dict()
    split = torch.optim.Adam([{"params": [p], "lr": 1.0} for p in model.parameters()])
    OptimizerState(split, model).load_state_dict(state)
    assert [group["lr"] for group in split.param_groups] == [0.3] * 4


def test_nested_state_keeps_its_dtype() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factors = [torch.randn(2, 2), {"inner": torch.randn(2)}]
    optimizer.state[model.weight]["factors"] = factors
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizerState(fresh, model).load_state_dict(OptimizerState(optimizer, model).state_dict())
    loaded = fresh.state[model.weight]["factors"]
    assert torch.equal(loaded[0], factors[0])
    assert torch.equal(loaded[1]["inner"], factors[1]["inner"])


def test_nested_state_keeps_its_texts_and_kinds() -> None:
    """PyTorch makes the name of a generator of a text."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {"kind": "power", "order": OrderedDict(b=("x", [b"y"]), a=None), "seen": Counter("aab")}
    optimizer.state[model.weight].update(kept)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizerState(fresh, model).load_state_dict(OptimizerState(optimizer, model).state_dict())
    assert fresh.state[model.weight] == kept
    assert [type(value) for value in fresh.state[model.weight].values()] == [str, OrderedDict, Counter]


def test_the_numbers_of_parameters_are_found_without_a_search() -> None:
    """PyTorch asks whether each is in the group: of a list, that takes the square of its length."""

    class Watched(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            seen.extend(group["params"] for group in state_dict["param_groups"])
            super().load_state_dict(state_dict)

    seen: list[object] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[1].parameters()}, {"params": []}, {"params": model[0].parameters()}]
    optimizer = Watched(groups, lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = OptimizerState(optimizer, model)
    state.load_state_dict(state.state_dict())
    assert seen == [range(2), range(2, 2), range(2, 4)]
