"""A loss is a sum and a count, so that it can be averaged over any set of tokens exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

IGNORE_INDEX = -100
"""Label of a position that does not count."""


class TokenLoss(Protocol):
    """What the trainer needs of a loss."""

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar on the labels' device."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum of the losses of these positions: float32 scalar."""


class CausalLMLoss:
    """Cross-entropy of the next token, in natural units (nats).

    Labels are not shifted beforehand: position t of the logits is held against label t + 1, as in
    Hugging Face models. Labels of -100 do not count.

    Args:
        label_smoothing: Share of the target mass spread evenly over the vocabulary, 0 to 1.
        z_loss: Weight of the squared log-partition term of PaLM (Chowdhery et al. 2022, section 5).
    """

    def __init__(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss

    def count(self, labels: Tensor) -> Tensor:
        """Number of predicted positions.

        Args:
            labels: int64 [batch, sequence].

        Returns:
            int64 scalar.
        """
        return (labels[..., 1:] != IGNORE_INDEX).sum()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            logits: Floating [batch, sequence, vocabulary].
            labels: int64 [batch, sequence], not shifted.

        Returns:
            float32 scalar.
        """
        predictions = logits[..., :-1, :].flatten(0, -2).float()
        targets = labels[..., 1:].flatten()
        total = functional.cross_entropy(
            predictions,
            targets,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if self.z_loss:
            partition = torch.logsumexp(predictions, dim=-1)
            total = total + self.z_loss * partition.square().masked_fill(targets == IGNORE_INDEX, 0.0).sum()
        return total


class MeanLoss:
    """Turns a loss that returns a mean into a sum and a count.

    Args:
        function: `(logits, labels) -> mean` over the positions that `count` counts.
        count: `labels -> int64 scalar`, the denominator that `function` divided by.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], count: Callable[[Tensor], Tensor]
    ) -> None:
        self.function = function
        self._count = count

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions in the mean: int64 scalar."""
        return self._count(labels)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean times count; 0 with a gradient of 0 where nothing counts, as such a mean is not a number."""
        counted = self._count(labels)
        # Both ends are replaced: the function's own gradient is not a number there either.
        safe = torch.where(counted > 0, logits, torch.zeros_like(logits))
        mean = self.function(safe, labels).float()
        return torch.where(counted > 0, mean * counted, torch.zeros_like(mean))
