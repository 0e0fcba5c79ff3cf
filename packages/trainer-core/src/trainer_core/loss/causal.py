"""Cross-entropy of the next token from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .predictions import logits_of
from .token_loss import (
    IGNORE_INDEX,
    check_next_token_labels,
    check_next_token_logits,
    count_next_tokens,
    next_tokens,
)


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
            labels: Integers [batch, sequence].

        Returns:
            int64 scalar.

        Raises:
            ConfigurationError: If the labels are something else.
        """
        check_next_token_labels(labels)
        return count_next_tokens(labels)

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: Logits, floating [batch, sequence, vocabulary], or a model output that has them.
            labels: Integers [batch, sequence], not shifted.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If there are no logits, or not one prediction for each label.
        """
        logits = logits_of(predictions)
        check_next_token_logits(logits, labels)
        logits = logits.view(-1, logits.shape[-1]) if logits.is_contiguous() else logits.flatten(0, -2)
        if logits.dtype is not torch.float32:
            logits = logits.float()
        targets = next_tokens(labels)
        total = functional.cross_entropy(
            logits,
            targets,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if self.z_loss:
            partition = torch.logsumexp(logits, dim=-1)
            total = total + self.z_loss * partition.square().masked_fill(targets == IGNORE_INDEX, 0.0).sum()
        return total
