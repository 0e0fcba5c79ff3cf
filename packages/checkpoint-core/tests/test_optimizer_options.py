"""Options that choose how a step is computed belong to the live optimizer, not to the checkpoint."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from checkpoint_core import OptimizerState

Make = Callable[[nn.Module], torch.optim.Optimizer]


def unfused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5.0, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def resumed(save: Make, load: Make) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """A model that continued with its own optimizer, and its twin with another kind, as of step 3."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    saved = save(model)
    for number in range(3):
        step(model, saved, number)
    twin = copy.deepcopy(model)
    live = load(twin)
    OptimizerState(live, twin).load_state_dict(copy.deepcopy(OptimizerState(saved, model).state_dict()))
    for number in range(3, 6):
        step(model, saved, number)
    return twin, live, model


@pytest.mark.parametrize(("save", "load", "fuses"), [(unfused, fused, True), (fused, unfused, None)])
def test_one_implementation_goes_on_from_the_other(save: Make, load: Make, fuses: bool | None) -> None:
    twin, live, model = resumed(save, load)
    built = load(twin).param_groups[0]
    group = live.param_groups[0]
    assert group["fused"] is fuses
    for name in ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay"):
        assert group[name] is built[name], name
    assert group["lr"] == save(model).param_groups[0]["lr"]
    for number in range(3, 6):
        step(twin, live, number)
    # Both compute the same formula, and round in another order.
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(state["step"] == 6 for state in live.state.values())


def test_a_fused_one_skips_a_step_after_it_took_up_the_state_of_an_unfused_one() -> None:
    twin, live, _ = resumed(unfused, fused)
    before = [parameter.detach().clone() for parameter in twin.parameters()]
    live.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    step(twin, live, 3)
    assert all(torch.equal(one, other) for one, other in zip(before, twin.parameters(), strict=True))
    live.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    step(twin, live, 3)
    assert not any(torch.equal(one, other) for one, other in zip(before, twin.parameters(), strict=True))


def test_adam_decays_through_its_moments_also_with_the_state_of_adamw() -> None:
    twin, live, _ = resumed(
        lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.5),
        lambda model: torch.optim.Adam(model.parameters()),
    )
    assert live.param_groups[0]["weight_decay"] == 0.5
    expected = {p: 0.9 * live.state[p]["exp_avg"] + 0.1 * 0.5 * p.detach() for p in twin.parameters()}
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live.step()
    for parameter, moment in expected.items():
        torch.testing.assert_close(live.state[parameter]["exp_avg"], moment)


def test_groups_of_other_implementations_merge() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    groups = [{"params": layer.parameters()} for layer in model]
    saved = torch.optim.AdamW(groups, lr=0.25, fused=True)
    saved.param_groups[1]["fused"], saved.param_groups[1]["foreach"] = False, True
    step(model, saved, 0)
    live = fused(model)
    OptimizerState(live, model).load_state_dict(OptimizerState(saved, model).state_dict())
    assert (live.param_groups[0]["lr"], live.param_groups[0]["fused"]) == (0.25, True)
    step(model, live, 1)
    assert all(state["step"] == 2 for state in live.state.values())
