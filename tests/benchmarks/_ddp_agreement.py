"""Whether the contenders of the data-parallel benchmark did the same work: losses and weights in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from _ddp_contenders import BARE
from _step_agreement import TOLERANCE, _loss, _weights
from _step_work import Work
from torch import nn


def agreement(models: Mapping[str, nn.Module], work: Work) -> dict[str, Any]:
    """Deviations of every trained model from that of the bare loop. Called on all ranks.

    Raises:
        SystemExit: One of them is larger than `TOLERANCE`; that contender did other work. Or the ranks have
            different weights.
    """
    losses = {label: _loss(model, work) for label, model in models.items()}
    ends = {label: _weights(model) for label, model in models.items()}
    for label, end in ends.items():
        first = end.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(end, first):
            raise SystemExit(f"{label} left other weights on rank {dist.get_rank()} than on rank 0")
    way = torch.linalg.vector_norm(ends[BARE.label] - _weights(work.model()))
    deviations = {
        label: {
            "loss": abs(losses[label] / losses[BARE.label] - 1),
            "weights": (torch.linalg.vector_norm(ends[label] - ends[BARE.label]) / way).item(),
        }
        for label in models
    }
    largest = {kind: max((told[kind], label) for label, told in deviations.items()) for kind in TOLERANCE}
    for kind, (deviation, label) in largest.items():
        if not deviation <= TOLERANCE[kind]:
            raise SystemExit(
                f"{label} did other work than the bare loop: its {kind} deviates by {deviation:.1e}, more "
                f"than {TOLERANCE[kind]:.0e}"
            )
    return {"steps": work.steps, "losses": losses, "deviations": deviations, "largest": largest}
