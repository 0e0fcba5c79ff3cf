"""Using the model in between, without a trace in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from checkpoint_core import RNGState


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module and all random generators are put back."""
    modes = {module: module.training for module in model.modules()}
    generators = RNGState()
    before = generators.state_dict()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        generators.load_state_dict(before)
        for module, training in modes.items():
            module.training = training
