"""What the trainer needs of a loss, and the labels that do not count."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that does not count."""


class TokenLoss(Protocol):
    """A loss as a sum and a count, so that it can be averaged over any set of tokens exactly.

    A loss may have a third method, `predict(model, inputs, labels) -> object`, which runs the model in a way
    of its own; what it returns is given to the loss as `predictions`. Without it the loss is given the
    logits. It is called inside the autocast context of the run, if there is one.
    """

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar on the labels' device."""

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses of these positions: float32 scalar."""


def count_next_tokens(labels: Tensor) -> Tensor:
    """Number of positions that a causal language model predicts.

    Args:
        labels: int64 [batch, sequence], not shifted. The first label of a row is never predicted.

    Returns:
        int64 scalar on the labels' device.
    """
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def next_tokens(labels: Tensor) -> Tensor:
    """For each position the label of the next one; the last of a row does not count.

    The shift is made on the labels because they are small: logits and hidden states are used as they are,
    where leaving out the last position of each row would copy them.

    Args:
        labels: int64 [batch, sequence], not shifted.

    Returns:
        int64 [batch * sequence].
    """
    return torch.constant_pad_nd(labels[..., 1:], (0, 1), IGNORE_INDEX).view(-1)
