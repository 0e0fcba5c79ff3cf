"""What the trainer needs of a loss, and the labels that do not count."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dataloader_dispatch import is_ignored

from ..errors import ConfigurationError

IGNORE_INDEX = -100
"""Label of a position that does not count."""

_INSTEAD = (
    "for classes give compute_loss_func=ClassificationLoss(), for numbers RegressionLoss(), for a loss of "
    "your own MeanLoss(function, count)"
)


class TokenLoss(Protocol):
    """A loss as a sum and a count, so that it can be averaged over any set of tokens exactly.

    A loss may have a third method, `predict(model, inputs, labels) -> object`, which runs the model in a way
    of its own; what it returns is given to the loss as `predictions`. Without it the loss is given the
    logits. It is called inside the autocast context of the run, if there is one.
    """

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar on the labels' device.

        Of a weighted mean it is the sum of the weights, a floating scalar.
        """

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses of these positions: float32 scalar."""


def loss_denominator(count: Tensor) -> Tensor:
    """What a sum of losses is divided by: what counts in it, or 1 if nothing does.

    A count below 1 is one of weights, and stays as it is.
    """
    return torch.where(count > 0, count, 1)


def count_next_tokens(labels: Tensor) -> Tensor:
    """Number of positions that a causal language model predicts.

    Args:
        labels: Integers [batch, sequence], not shifted. The first label of a row is never predicted.

    Returns:
        int64 scalar on the labels' device.
    """
    return (~is_ignored(labels[..., 1:])).sum()


def check_next_token_labels(labels: Tensor) -> None:
    """Refuse labels of which none is the next token of another.

    Raises:
        ConfigurationError: If they are not integers [batch, sequence].
    """
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool)
    if labels.ndim != 2 or not integers:
        raise _not_next_tokens(f"the labels are {_described(labels)}")


def check_next_token_logits(logits: Tensor, labels: Tensor) -> None:
    """Refuse logits that are not one prediction for each position of the labels.

    Raises:
        ConfigurationError: If they are not [batch, sequence, vocabulary].
    """
    check_next_token_labels(labels)
    if logits.ndim != 3 or logits.shape[:-1] != labels.shape:
        raise _not_next_tokens(f"the logits are {_described(logits)} and the labels {_described(labels)}")


def _not_next_tokens(found: str) -> ConfigurationError:
    return ConfigurationError(
        "compute_loss_func",
        None,
        "the default loss predicts the next token and needs logits [batch, sequence, vocabulary] and integer "
        f"labels [batch, sequence], but {found}",
        _INSTEAD,
    )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def next_tokens(labels: Tensor) -> Tensor:
    """For each position the label of the next one; the last of a row does not count.

    The shift is made on the labels because they are small: logits and hidden states are used as they are,
    where leaving out the last position of each row would copy them.

    Args:
        labels: Integers [batch, sequence], not shifted.

    Returns:
        int64 [batch * sequence].
    """
    return torch.constant_pad_nd(labels[..., 1:].long(), (0, 1), IGNORE_INDEX).view(-1)
