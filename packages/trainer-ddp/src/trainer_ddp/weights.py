"""Equal weights on all ranks before the first step."""

from __future__ import annotations

import torch
from torch import nn

from trainer_core import DataParallel


@torch.no_grad()
def refuse_unequal_weights(model: nn.Module, parallel: DataParallel) -> None:
    """Refuse to start where ranks have different weights; collective.

    Sums of each parameter and of its squares are compared, in float64.

    Raises:
        ConfigurationError: On every rank, naming the first parameter that differs.
    """
    named = list(model.named_parameters())
    if not named:
        return
    sums = [torch.stack([value.double().sum(), value.double().square().sum()]) for _, value in named]
    figures = torch.stack(sums).tolist()
    parallel.agree(
        {
            f"sums of the weights {name} (ddp.init_sync is off)": tuple(pair)
            for (name, _), pair in zip(named, figures, strict=True)
        }
    )
