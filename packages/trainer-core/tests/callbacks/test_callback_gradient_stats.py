from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import GradientStatistics

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]


class Blocks(nn.Module):
    """Two numbered layers between an embedding and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 7)
        self.head.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def one_step(
    callback: GradientStatistics, args: TrainingArguments, state: TrainerState
) -> tuple[Blocks, ...]:
    """One optimizer step of a loop by hand; returns the model before (with gradients) and after it."""
    torch.manual_seed(3)
    model, before = Blocks(), Blocks()
    before.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([[1, 2, 3]])).logsumexp(-1).sum().backward()
    for copy, parameter in zip(before.parameters(), model.parameters(), strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    control = TrainerControl()
    callback.on_pre_optimizer_step(args, state, control, model=model)
    optimizer.step()
    optimizer.zero_grad()
    callback.on_optimizer_step(args, state, control, model=model)
    return before, model


def test_figures_are_those_of_the_step(arguments: Arguments, state: State) -> None:
    callback = GradientStatistics()
    args = arguments(logging_steps=1)
    before, after = one_step(callback, args, state(4))
    logs: dict[str, object] = {"loss": 1.0}
    callback.on_log_step(args, state(5), TrainerControl(), logs=logs)
    blocks = {"embed": before.embed, "layers.0": before.layers[0], "layers.1": before.layers[1]}
    assert set(logs) == {"loss"} | {
        f"{kind}/{block}" for kind in ("grad", "grad_zeros", "param", "update") for block in blocks
    }
    for block, module in blocks.items():
        gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()
        values = torch.cat([p.detach().flatten() for p in module.parameters()]).double()
        moved = torch.cat([p.detach().flatten() for p in after.get_submodule(block).parameters()]).double()
        expected = {
            "grad": gradient.norm(),
            "grad_zeros": (gradient == 0).double().mean(),
            "param": values.norm(),
            "update": (moved - values).norm() / values.norm(),
        }
        for kind, value in expected.items():
            assert logs[f"{kind}/{block}"] == pytest.approx(value.item(), rel=1e-5)
    # Four of the seven rows of the embedding were not looked up.
    assert logs["grad_zeros/embed"] == pytest.approx(4 / 7)


def test_figures_are_added_once(arguments: Arguments, state: State) -> None:
    callback = GradientStatistics()
    args = arguments(logging_steps=1)
    one_step(callback, args, state(0))
    first: dict[str, object] = {}
    second: dict[str, object] = {}
    callback.on_log_step(args, state(1), TrainerControl(), logs=first)
    callback.on_log_step(args, state(1), TrainerControl(), logs=second)
    assert len(first) == 12
    assert not second


@pytest.mark.parametrize(
    ("settings", "every", "max_steps", "measured"),
    [
        ({"logging_steps": 5}, None, 12, {5, 10, 12}),
        ({"logging_steps": 5, "logging_first_step": True}, None, -1, {1, 5, 10}),
        ({"logging_strategy": "no"}, None, 12, set()),
        ({"logging_steps": 6}, 4, 12, {4, 8, 12}),
    ],
)
def test_only_steps_that_are_looked_at_are_measured(
    settings: dict[str, object],
    every: int | None,
    max_steps: int,
    measured: set[int],
    arguments: Arguments,
    state: State,
) -> None:
    args = arguments(**settings)
    seen = set()
    for step in range(1, 13):
        callback = GradientStatistics(every=every)
        one_step(callback, args, state(step - 1, max_steps=max_steps))
        logs: dict[str, object] = {}
        callback.on_log_step(args, state(step), TrainerControl(), logs=logs)
        if logs:
            seen.add(step)
    assert seen == measured


def test_chosen_figures_and_blocks(arguments: Arguments, state: State) -> None:
    callback = GradientStatistics(statistics=["grad"], block_of=lambda name: name.split(".")[0])
    args = arguments(logging_steps=1)
    one_step(callback, args, state(0))
    logs: dict[str, object] = {}
    callback.on_log_step(args, state(1), TrainerControl(), logs=logs)
    assert set(logs) == {"grad/embed", "grad/layers"}


def test_the_curve_of_a_run_is_the_same_and_has_the_figures(
    make_trainer: Callable[..., Trainer], curve: Callable[[Trainer], list[tuple[float, float]]]
) -> None:
    plain = make_trainer(max_steps=4)
    plain.train()
    measured = make_trainer(max_steps=4, callbacks=[GradientStatistics()])
    measured.train()
    assert curve(measured) == curve(plain)
    for entry in measured.state.log_history[:4]:
        norms = [float(entry[f"grad/{block}"]) for block in ("embed", "mix", "head")]  # type: ignore[arg-type]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(entry["grad_norm"], rel=1e-5)


def test_nothing_reaches_the_host_in_a_step(
    arguments: Arguments, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu"):
        real = getattr(Tensor, name)

        def counting(tensor: Tensor, *given: object, _real: object = real, _name: str = name) -> object:
            looks.append(_name)
            return _real(tensor, *given)  # type: ignore[operator]

        monkeypatch.setattr(Tensor, name, counting)
    callback = GradientStatistics()
    args = arguments(logging_steps=1)
    one_step(callback, args, state(0))
    assert not looks
    callback.on_log_step(args, state(1), TrainerControl(), logs={})
    assert looks == ["tolist"]


def test_bad_settings(arguments: Arguments, state: State) -> None:
    with pytest.raises(ConfigurationError, match="every=0 must be 1 or more"):
        GradientStatistics(every=0)
    with pytest.raises(ConfigurationError, match="Choose from grad, grad_zeros, param, update"):
        GradientStatistics(statistics=["norm"])
    with pytest.raises(ConfigurationError, match="logging_strategy='epoch' does not tell in advance"):
        GradientStatistics().on_train_begin(arguments(logging_strategy="epoch"), state(), TrainerControl())
