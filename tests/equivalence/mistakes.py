"""What goes wrong on purpose, to see that it is seen."""

from __future__ import annotations

import os

from torch import Tensor
from torch.nn import functional

from .data import IGNORED


class MeanOfEachMicrobatch:
    """The mistake that accumulation invites: each microbatch counts alike, however few tokens it has."""

    def count(self, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != IGNORED).any().long()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="sum"
        )
        return losses / (labels[:, 1:] != IGNORED).sum().clamp(min=1)


def mean_of_means() -> dict[str, object]:
    """Options of a trainer that makes this mistake."""
    return {"compute_loss_func": MeanOfEachMicrobatch()}


class Leave:
    """Ends the process of rank 1 without a word, at one optimizer step."""

    def on_forward_backward_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        if os.environ["RANK"] == "1" and state.global_step == 3:  # type: ignore[attr-defined]
            os._exit(17)


def leave() -> dict[str, object]:
    """Options of a trainer that loses a rank."""
    return {"callbacks": [Leave()]}
