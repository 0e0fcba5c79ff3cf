"""Whether the contenders of the step benchmark did the same work: their losses and weights in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from _step_contenders import CONTENDERS, PLAIN
from _step_work import Work, mean_loss
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

TOLERANCE = {"loss": 1e-4, "weights": 1e-3}
"""Most that a contender may deviate from the plain loop: the loss relative to it, the weights relative to the
way that they went. Kernels of AdamW and orders of roundings differ. A learning rate that is off by 1 %, or
another order of the batches, shows as 0.01 and more in the weights."""


def agreement(models: Mapping[str, nn.Module], work: Work) -> dict[str, Any]:
    """Deviations of every trained model from that of the plain loop.

    Raises:
        SystemExit: One of them is larger than `TOLERANCE`; that contender did other work.
    """
    losses = {label: _loss(model, work) for label, model in models.items()}
    ends = {label: _weights(model) for label, model in models.items()}
    way = torch.linalg.vector_norm(ends[PLAIN.label] - _weights(work.model()))
    deviations = {
        contender.label: {
            "loss": abs(losses[contender.label] / losses[PLAIN.label] - 1),
            "weights": (torch.linalg.vector_norm(ends[contender.label] - ends[PLAIN.label]) / way).item(),
        }
        for contender in CONTENDERS
    }
    largest = {kind: max((told[kind], label) for label, told in deviations.items()) for kind in TOLERANCE}
    for kind, (deviation, label) in largest.items():
        if not deviation <= TOLERANCE[kind]:
            raise SystemExit(
                f"{label} did other work than the plain loop: its {kind} deviates by {deviation:.1e}, more "
                f"than {TOLERANCE[kind]:.0e}"
            )
    return {"steps": work.steps, "losses": losses, "deviations": deviations, "largest": largest}


@torch.no_grad()
def _loss(model: nn.Module, work: Work) -> float:
    batch = work.batches[0]
    return mean_loss(model(batch["input_ids"]), batch["labels"]).item()


def _weights(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().double()
