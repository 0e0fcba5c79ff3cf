"""Where a model is told to make no key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer_core.model.activation_checkpointing import leave_caches_out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.asked: list[bool] = []

    def forward(self, hidden: Tensor, past: object = None, use_cache: bool = True) -> Tensor:
        self.asked.append(use_cache)
        return self.linear(hidden)


class Model(nn.Module):
    """Calls its block by position or by name."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.block = Block()
        self.by_name = by_name

    def forward(self, hidden: Tensor) -> Tensor:
        if self.by_name:
            return self.block(hidden, use_cache=True)
        return self.block(hidden, None, True)


def test_however_the_model_passes_the_switch_on() -> None:
    for by_name in (True, False):
        model = Model(by_name=by_name)
        leave_caches_out(model)
        model(torch.ones(1, 2))
        with torch.no_grad():
            model(torch.ones(1, 2))
        model.eval()
        model(torch.ones(1, 2))
        assert model.block.asked == [False, True, True]


def test_without_a_word_from_the_caller() -> None:
    block = Block()
    leave_caches_out(block)
    block(torch.ones(1, 2))
    assert block.asked == [False]
