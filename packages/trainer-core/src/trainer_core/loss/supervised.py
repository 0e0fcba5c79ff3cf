"""Losses of models that classify, and of models that predict numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dataloader_dispatch import is_ignored

from ..errors import ConfigurationError
from .token_loss import IGNORE_INDEX, logits_of


class ElementLoss(Protocol):
    """A loss of torch.nn.functional that can be had for each element, such as `mse_loss`."""

    def __call__(self, predictions: Tensor, labels: Tensor, /, *, reduction: str) -> Tensor:
        """With `reduction="none"`: one loss for each label, in their shape."""


class ClassificationLoss:
    """Cross-entropy of classes, in natural units (nats), for examples or for each position of them.

    Labels are compared with the logits as they stand, nothing is shifted. Labels of -100 do not count. The
    mean is that of `torch.nn.functional.cross_entropy` with the same options, over the whole batch of an
    optimizer step.

    Args:
        weight: A weight for each class. The mean is over the weights of the labels then, as in torch.
        label_smoothing: Share of the target mass spread evenly over the classes, 0 to 1.
        class_dim: Which dimension of the logits the classes are: the last, or 1 for images [batch, classes,
            height, width], as torch's own loss has them.

    Raises:
        ConfigurationError: If the weights are not one row of finite numbers of 0 or more, or the smoothing is
            out of range.
    """

    def __init__(
        self,
        *,
        weight: Tensor | Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        class_dim: int = -1,
    ) -> None:
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigurationError(
                "label_smoothing", label_smoothing, "must be from 0 to 1", "choose a value such as 0.1"
            )
        self.weight = None if weight is None else _weights(weight)
        self.label_smoothing = label_smoothing
        self.class_dim = class_dim

    def count(self, labels: Tensor) -> Tensor:
        """What the mean is over.

        Args:
            labels: Signed integers of any shape.

        Returns:
            The number of labels that count: int64 scalar; with class weights the sum of theirs: float32.

        Raises:
            ConfigurationError: If the labels are not signed integers, or too large for the class weights.
        """
        _check_classes(labels)
        counts = ~is_ignored(labels)
        weight = self._weight_on(labels.device)
        if weight is None:
            return counts.sum()
        return weight[labels.where(counts, 0).long()].where(counts, 0).sum()

    def make_targets(self, labels: Tensor) -> Tensor:
        """The labels: each is compared with the prediction at its place."""
        return labels

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses, as a call has it."""
        return self(predictions, targets)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: Logits, floating [*labels, classes], or a model output that has them.
            labels: Signed integers of any shape, classes from 0.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If there are no logits, or they do not fit labels or weights.
        """
        logits = logits_of(predictions)
        _check_classes(labels)
        self._check_logits(logits, labels)
        logits = logits.movedim(self.class_dim, -1).flatten(0, -2) if logits.ndim > 1 else logits[None]
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        weight = self._weight_on(logits.device)
        return functional.cross_entropy(
            logits,
            labels.flatten().long(),
            weight=None if weight is None else weight.to(logits.dtype),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        ).float()

    def _check_logits(self, logits: Tensor, labels: Tensor) -> None:
        shape = list(logits.shape)
        dim = self.class_dim + (logits.ndim if self.class_dim < 0 else 0)
        classes = shape.pop(dim) if 0 <= dim < len(shape) else 0
        if shape != list(labels.shape) or classes == 0:
            raise ConfigurationError(
                "compute_loss_func",
                "ClassificationLoss",
                "needs logits with the shape of the labels and one more dimension for the classes "
                f"(class_dim={self.class_dim}), but the logits are {list(logits.shape)} and the labels "
                f"{list(labels.shape)}",
                "reshape one of them in the model or the data_collator, or set class_dim",
            )
        if classes == 1:
            raise ConfigurationError(
                "compute_loss_func",
                "ClassificationLoss",
                f"needs two classes or more, but the logits are {list(logits.shape)}, and the loss of a "
                "single class is always 0",
                "give the model two outputs, or use floating labels of 0 and 1 with "
                "RegressionLoss(torch.nn.functional.binary_cross_entropy_with_logits)",
            )
        if self.weight is not None and len(self.weight) != classes:
            raise ConfigurationError(
                "weight",
                self.weight.tolist(),
                f"must have one number for each of the {classes} classes",
                f"give {classes} numbers, or leave it out",
            )

    def _weight_on(self, device: torch.device) -> Tensor | None:
        """The class weights on a device, copied there once."""
        if self.weight is not None and self.weight.device != device:
            self.weight = self.weight.to(device)
        return self.weight


class RegressionLoss:
    """Mean of a loss of each number, the squared error by default.

    The mean is that of `function` over the whole batch of an optimizer step. A label that is not a number
    makes it not a number, as in torch, and `nonfinite_policy` deals with the step.

    Args:
        function: Called with `(predictions, labels, reduction="none")`, gives a loss for each label:
            `torch.nn.functional.mse_loss`, `l1_loss`, `huber_loss`; `binary_cross_entropy_with_logits` for
            examples of several classes at once; `functools.partial` sets further options.
        skip_nan: Whether labels that are not a number do not count, so that targets may be missing.
    """

    def __init__(self, function: ElementLoss = functional.mse_loss, *, skip_nan: bool = False) -> None:
        self.function = function
        self.skip_nan = skip_nan

    def count(self, labels: Tensor) -> Tensor:
        """Number of labels that count: int64 scalar.

        Args:
            labels: Floating, of any shape.

        Raises:
            ConfigurationError: If the labels are not floating.
        """
        _check_numbers(labels)
        return self._counts(labels).sum()

    def make_targets(self, labels: Tensor) -> Tensor:
        """The labels: each is compared with the prediction at its place."""
        return labels

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses, as a call has it."""
        return self(predictions, targets)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: Floating, in the shape of the labels or with one more dimension of 1 at the end, or a
                model output that has such `logits`.
            labels: Floating, of any shape.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If shapes differ, which torch would broadcast, or there are no predictions.
        """
        _check_numbers(labels)
        values = logits_of(predictions)
        if values.shape == (*labels.shape, 1):
            values = values.squeeze(-1)
        if values.shape != labels.shape:
            raise ConfigurationError(
                "compute_loss_func",
                "RegressionLoss",
                "needs predictions with the shape of the labels, but the predictions are "
                f"{list(values.shape)} and the labels {list(labels.shape)}, which torch would broadcast",
                "reshape one of them in the model or the data_collator",
            )
        dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
        counts = self._counts(labels)
        losses = self.function(values.to(dtype), labels.where(counts, 0).to(dtype), reduction="none")
        if losses.shape != labels.shape:
            raise ConfigurationError(
                "function",
                self.function,
                f"returned a tensor of shape {list(losses.shape)} for labels of shape {list(labels.shape)}",
                "give one that returns a loss for each label when it is called with reduction='none'",
            )
        return losses.where(counts, 0).sum().float()

    def _counts(self, labels: Tensor) -> Tensor:
        # Those of a batch that fills up are "not a number" too, of a kind of their own.
        return ~(labels.isnan() if self.skip_nan else is_ignored(labels))


def _weights(given: Tensor | Sequence[float]) -> Tensor:
    weight = torch.as_tensor(given, dtype=torch.float32).detach()
    if weight.ndim != 1 or not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ConfigurationError(
            "weight",
            given,
            "must be one row of finite numbers of 0 or more",
            "give one for each class, such as torch.tensor([1.0, 2.0])",
        )
    return weight


def _check_classes(labels: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex() or not labels.dtype.is_signed:
        raise ConfigurationError(
            "compute_loss_func",
            "ClassificationLoss",
            f"needs labels of a signed integer type, which can hold {IGNORE_INDEX} for one that does not "
            f"count, but these are {labels.dtype}",
            "convert class indices by labels.long(). Use "
            "RegressionLoss(torch.nn.functional.binary_cross_entropy_with_logits) for several classes at "
            "once, and MeanLoss(function, count) for probabilities",
        )


def _check_numbers(labels: Tensor) -> None:
    if not labels.is_floating_point():
        raise ConfigurationError(
            "compute_loss_func",
            "RegressionLoss",
            "needs floating-point labels, which can be nan where one does not count, but these are "
            f"{labels.dtype}",
            "convert them by labels.float(), or use ClassificationLoss() for classes",
        )
