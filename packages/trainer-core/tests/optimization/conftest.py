"""A model with every kind of parameter, gradients for it, and arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer_core import TrainingArguments


class PlaneNorm(nn.Module):
    """A norm whose weight has two dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Net(nn.Module):
    """Embedding, two layers with norms, a head; tied if asked."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "plane": PlaneNorm(8), "linear": nn.Linear(8, 8)})
            for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def block(self, layer: nn.ModuleDict, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(layer["linear"](layer["plane"](layer["norm"](hidden))))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = self.block(layer, hidden)
        return self.head(hidden)


@pytest.fixture
def net() -> Callable[..., Net]:
    """Makes the model with the same weights every time."""

    def make(*, tied: bool = False) -> Net:
        torch.manual_seed(3)
        return Net(tied)

    return make


@pytest.fixture
def loss_of() -> Callable[[nn.Module, int], Tensor]:
    """The loss of a step, on data that depends on the step alone."""

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())

    return loss


@pytest.fixture
def arguments() -> Callable[..., TrainingArguments]:
    """Arguments with a large learning rate, and a decay unless it is given."""

    def make(**settings: object) -> TrainingArguments:
        return TrainingArguments(**({"learning_rate": 1e-2, "weight_decay": 0.1} | settings))  # type: ignore[arg-type]

    return make
