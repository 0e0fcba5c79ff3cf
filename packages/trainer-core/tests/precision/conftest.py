"""Settings and a small model for tests of autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trainer_core import TrainingArguments


@pytest.fixture
def settings() -> Callable[..., TrainingArguments]:
    """Makes arguments of a run."""

    def make(**given: object) -> TrainingArguments:
        return TrainingArguments(output_dir="unused", **given)  # type: ignore[arg-type]

    return make


class Setup(SimpleNamespace):
    """A regression: model, inputs and targets."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self) -> Tensor:
        return (self.model(self.inputs) - self.targets).float().square().mean()


@pytest.fixture
def regression() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs = torch.randn(64, 8)
    return Setup(model=model, inputs=inputs, targets=inputs.sum(-1, keepdim=True).sin())
