"""The loss that a model computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from .convention import Returns, find_convention
from .head import bare
from .mean import countable, counted_of
from .predictions import loss_in


class ModelLoss:
    """The model is given the labels and returns its loss; this makes it a sum and a count.

    A Hugging Face model that is told `num_items_in_batch=1` returns the sum. One that has no such argument
    returns a mean, which is multiplied by the declared count. Which of the two a model does is found out
    before the first loss, by running it on that batch in evaluation mode and comparing what it returns; a
    count that does not fit the model's mean is refused then.

    Args:
        count: `labels -> int64 scalar`, the number of positions that the model's mean is over;
            `count_next_tokens` for a causal language model.
    """

    def __init__(self, *, count: Callable[[Tensor], Tensor]) -> None:
        self._count = count
        self._returns: Returns | None = None
        self._one: dict[torch.device, Tensor] = {}

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar; 0 for labels of which none does."""
        return counted_of(self._count, labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run the model with its labels.

        Args:
            model: The module to call, with all wrappers.
            inputs: Its keyword arguments, without labels.
            labels: int64 [batch, sequence], not shifted; the model shifts them itself if it has to.

        Returns:
            What the model returned.

        Raises:
            ConfigurationError: If the model takes no labels, returns no loss, or returns one that is neither
                the sum nor the mean over what `count` counts.
        """
        if self._returns is None:
            _check_takes(model, "labels")
            takes_items = _takes(model, "num_items_in_batch")
            self._returns = find_convention(model, inputs, labels, self._count, takes_items=takes_items)
        if self._returns is Returns.SUM:
            return model(**inputs, labels=labels, num_items_in_batch=self._one_on(labels.device))
        # The mean over nothing is not a number, nor is its gradient; `__call__` takes this one times 0.
        return model(**inputs, labels=countable(labels, self.count(labels)))

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: What `predict` returned.
            labels: The same as there.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If the model returned no scalar loss.
        """
        value = loss_in(predictions).float()
        return value if self._returns is Returns.SUM else value * self.count(labels)

    def _one_on(self, device: torch.device) -> Tensor:
        """1 on a device, made once: a new one each step would have to be copied there."""
        if device not in self._one:
            self._one[device] = torch.ones((), dtype=torch.int64, device=device)
        return self._one[device]


def _check_takes(model: nn.Module, name: str) -> None:
    if not _takes(model, name):
        raise ConfigurationError(
            "compute_loss_func",
            "ModelLoss",
            f"{type(bare(model)).__name__}.forward has no argument {name}",
            "leave compute_loss_func out to have the loss computed from the model's logits, or give the "
            f"model an argument {name}",
        )


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(bare(model).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
