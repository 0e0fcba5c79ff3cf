"""Losses of the user that return a mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from dataloader_dispatch import is_ignored

from .predictions import logits_of


class MeanLoss:
    """Turns a loss of the logits that returns a mean into a sum and a count.

    Args:
        function: `(logits, labels) -> mean` over the positions that `count` counts.
        count: `labels -> scalar`, the denominator that `function` divided by: a number of positions, or the
            sum of their weights. Labels of -100, and floating ones that are not a number, must not be in it.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], count: Callable[[Tensor], Tensor]
    ) -> None:
        self.function = function
        self._count = count

    def count(self, labels: Tensor) -> Tensor:
        """What the mean is over: scalar; 0 for labels of which none counts, as of a batch that fills up."""
        return counted_of(self._count, labels)

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Mean times count; 0 with a gradient of 0 where nothing counts, as such a mean is not a number.

        Args:
            predictions: Logits, or a model output that has them.
            labels: As the function takes them.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If there are no logits.
        """
        counted = self.count(labels)
        logits = logits_of(predictions)
        # A tensor of its own, so that the hook below does not stay with the caller's.
        logits = logits.view_as(logits)
        _guard(logits, counted)
        return _total(self.function(logits, countable(labels, counted)), counted)


class OutputMeanLoss:
    """Turns a loss of the model's whole output that returns a mean into a sum and a count.

    Args:
        function: `(outputs, labels) -> mean` over the positions that `count` counts; `outputs` is what the
            model returned.
        count: `labels -> scalar`, the denominator that `function` divided by: a number of positions, or the
            sum of their weights. Labels of -100, and floating ones that are not a number, must not be in it.
    """

    def __init__(
        self, function: Callable[[object, Tensor], Tensor], count: Callable[[Tensor], Tensor]
    ) -> None:
        self.function = function
        self._count = count

    def count(self, labels: Tensor) -> Tensor:
        """What the mean is over: scalar; 0 for labels of which none counts, as of a batch that fills up."""
        return counted_of(self._count, labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run the model; everything it returns goes to the function."""
        return model(**inputs)

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Mean times count; 0 with a gradient of 0 where nothing counts, as such a mean is not a number.

        Args:
            predictions: What the model returned.
            labels: As the function takes them.

        Returns:
            float32 scalar.
        """
        counted = self.count(labels)
        _guard(predictions, counted)
        return _total(self.function(predictions, countable(labels, counted)), counted)


def counted_of(count: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    """What `count` says, and 0 where no label counts, whatever it says of those."""
    counted = torch.as_tensor(count(labels), device=labels.device)
    return torch.where(is_ignored(labels).all(), 0, counted)


def countable(labels: Tensor, counted: Tensor) -> Tensor:
    """The labels, or zeros if none counts: -100 is no index, and a mean over nothing is not a number."""
    return torch.where(counted > 0, labels, 0)


def _total(mean: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted > 0, mean.float() * counted, 0.0)


def _guard(outputs: object, counted: Tensor) -> None:
    """Let no gradient through where nothing counts: that of the mean is not a number there."""
    for tensor in _tensors(outputs):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: torch.where(counted > 0, gradient, 0.0)
            )


def _tensors(outputs: object) -> Iterator[Tensor]:
    """The tensors in a model's output."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for value in outputs:
            yield from _tensors(value)
    elif is_dataclass(outputs):
        for field in fields(outputs):
            yield from _tensors(getattr(outputs, field.name))
