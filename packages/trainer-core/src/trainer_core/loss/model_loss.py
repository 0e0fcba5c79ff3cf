"""Losses that return one number: a user's mean, and the loss that a model computes itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dataloader_dispatch import is_ignored

from ..errors import ConfigurationError
from ..model.run_settings import inference_mode_guard
from .head import bare
from .token_loss import IGNORE_INDEX, logits_of, loss_in

_CLOSE = 1e-3  # relative; the runs compared differ by rounding, or by a whole factor


class Returns(Enum):
    """What a model returns as its loss."""

    SUM = "sum"
    MEAN = "mean"


def find_convention(
    model: nn.Module,
    inputs: Mapping[str, object],
    labels: Tensor,
    count: Callable[[Tensor], Tensor],
    *,
    takes_items: bool,
) -> Returns:
    """Run a model a few times, in evaluation mode and without gradients, and compare its losses.

    Labels that do not count are replaced, so that every rank comes to its answer from its first batch.

    Args:
        model: The module to call, with all wrappers; its modes and the random generators are put back.
        inputs: Its keyword arguments, without labels.
        labels: int64 [batch, sequence].
        count: Declared number of positions that the mean is over.
        takes_items: Whether the model can be called with `num_items_in_batch`.

    Raises:
        ConfigurationError: If the loss is neither, or `count` does not fit it.
    """
    full = labels.masked_fill(labels == IGNORE_INDEX, 0)

    def loss(marked: Tensor, **more: object) -> float:
        return float(loss_in(model(**inputs, labels=marked, **more)))

    with inference_mode_guard(model), _eager(model):
        if takes_items:
            items = [torch.tensor(n, device=labels.device) for n in (1, 2)]
            one, two = (loss(full, num_items_in_batch=number) for number in items)
            if _same(one, 2 * two) and one != 0.0:
                _check_sum(one, loss(full), int(count(full)))
                return Returns.SUM
            if not _same(one, two):
                raise _refusal(
                    f"returned {one:.6g} with num_items_in_batch=1 and {two:.6g} with 2, which is not half "
                    "of it, so the model adds a term that is not a sum over tokens (an auxiliary loss?)",
                    "switch that term off, or compute the loss in a compute_loss_func of your own",
                )
        _check_mean(loss, full, count)
    return Returns.MEAN


def _check_sum(total: float, mean: float, counted: int) -> None:
    if not _same(total, mean * counted):
        raise _refusal(
            f"counted {counted} positions in a batch whose sum is {total:.6g} and whose mean is {mean:.6g}, "
            f"which is over {total / mean:.1f} positions",
            "count what the model's mean is over, for a causal language model with count=count_next_tokens",
        )


def _check_mean(loss: Callable[[Tensor], float], full: Tensor, count: Callable[[Tensor], Tensor]) -> None:
    """Mean times count must add up over two halves of the positions."""
    positions = torch.arange(full.shape[-1] if full.ndim else 1, device=full.device)
    halves = [full.masked_fill(positions % 2 == parity, IGNORE_INDEX) for parity in (0, 1)]
    counts = [int(count(part)) for part in (full, *halves)]
    if 0 in counts:
        return
    whole, *parts = (loss(part) * n for part, n in zip((full, *halves), counts, strict=True))
    if not _same(whole, sum(parts)):
        raise _refusal(
            f"gives {whole:.6g} as mean times count over all positions of a batch, but {sum(parts):.6g} "
            "when every other one is left out in turn, so count is not what the model's mean is over",
            "count what the model's mean is over, which leaves out labels of -100, for a causal language "
            "model with count=count_next_tokens",
        )


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))


def _refusal(rule: str, fix: str) -> ConfigurationError:
    return ConfigurationError("compute_loss_func", "ModelLoss", rule, fix)


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Run a compiled model without compiling it for the arguments used here."""
    compiled = any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()
    )
    # Asked for only then, as it loads the compiler.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


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

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
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

    def __init__(self, function: Callable[[Any, Tensor], Tensor], count: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self._count = count

    def count(self, labels: Tensor) -> Tensor:
        """What the mean is over: scalar; 0 for labels of which none counts, as of a batch that fills up."""
        return counted_of(self._count, labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run the model; everything it returns goes to the function."""
        return model(**inputs)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
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
    """The labels, or zeros if none counts: -100 is not an index, and a mean over nothing is not a number."""
    return torch.where(counted > 0, labels, 0)


def _total(mean: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted > 0, mean.float() * counted, 0.0)


def _guard(outputs: object, counted: Tensor) -> None:
    """Let no gradient through where nothing counts: that of the mean is not a number there."""
    for tensor in _tensors(outputs):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda gradient: torch.where(counted > 0, gradient, 0.0))


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

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
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
            f"needs the argument {name}, which {type(bare(model)).__name__}.forward does not have",
            "leave compute_loss_func out to have the loss computed from the model's logits, or give the "
            f"model an argument {name}",
        )


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(bare(model).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
