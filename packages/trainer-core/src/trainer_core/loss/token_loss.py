"""What the trainer needs of a loss, and cross-entropy of the next token from logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from dataloader_dispatch import is_ignored
from dist_env import get_logger

from ..errors import ConfigurationError

logger = get_logger(__name__)


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

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses of these positions: float32 scalar."""


class TargetLoss(TokenLoss, Protocol):
    """A loss that can be given targets in the place of labels, and so any part of a row.

    A trainer makes targets once, from whole rows, before it cuts microbatches or sequences, and calls
    `on_targets`; a method `predict` is then given targets, too. `count` is always given labels.
    """

    def make_targets(self, labels: Tensor) -> Tensor:
        """What the prediction at each place is compared with: in the shape of the labels, on their device."""

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses, as `__call__` has it of labels: float32 scalar."""


def takes_targets(loss: object) -> TypeGuard[TargetLoss]:
    """Whether a loss declares that it can be given targets, and means it.

    A class that inherits this, and has a `__call__` or `predict` of its own, is given labels.
    """
    if not (callable(getattr(loss, "make_targets", None)) and callable(getattr(loss, "on_targets", None))):
        return False
    classes = type(loss).__mro__

    def depth(name: str) -> int:
        return next((place for place, cls in enumerate(classes) if name in vars(cls)), len(classes))

    return depth("on_targets") <= min(depth("__call__"), depth("predict"))


class _PredictingLoss(TokenLoss, Protocol):
    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor, /) -> object: ...


def _predicts(loss: TokenLoss) -> TypeGuard[_PredictingLoss]:
    return getattr(loss, "predict", None) is not None


class OnTargets:
    """A loss that takes targets, as the trainer calls it: with targets, where others are given labels.

    Args:
        loss: The loss.
    """

    def __init__(self, loss: TargetLoss) -> None:
        self.loss = loss

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count, from labels."""
        return self.loss.count(labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run a model for the loss; likewise with targets."""
        return predict(self.loss, model, inputs, labels)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses of targets, which stand where labels do: float32 scalar."""
        return self.loss.on_targets(predictions, labels)


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
        "means the default loss, which predicts the next token and needs logits [batch, sequence, "
        f"vocabulary] and integer labels [batch, sequence], but {found}",
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
        int64 [batch, sequence].
    """
    return torch.constant_pad_nd(labels[..., 1:].long(), (0, min(1, labels.shape[-1])), IGNORE_INDEX)


Predict = Callable[[nn.Module, Mapping[str, object], Tensor], object]


def predict(loss: TokenLoss, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
    """Run a model for a loss: as the loss wants it, or else for the logits.

    Args:
        loss: May have a method `predict`.
        model: The module to call, with all wrappers.
        inputs: Keyword arguments of the model, without labels.
        labels: int64 [batch, sequence].

    Returns:
        What to call the loss with.

    Raises:
        ConfigurationError: If the model does not return what the loss needs.
    """
    if _predicts(loss):
        return loss.predict(model, inputs, labels)
    outputs = model(**inputs)
    added = auxiliary_loss_is_added.get()
    if not added and not isinstance(outputs, Tensor) and member(outputs, "aux_loss") is not None:
        _say_what_is_left_out()
    return logits_of(outputs)


auxiliary_loss_is_added: ContextVar[bool] = ContextVar("auxiliary_loss_is_added", default=False)
"""Whether whoever runs the model adds the loss of its routers to the one that is computed here."""


@cache
def _say_what_is_left_out() -> None:
    logger.warning(
        "the model returns an auxiliary loss (aux_loss, as routers of experts have it), and the built-in "
        "loss does not add it; give a compute_loss_func that weighs it, or switch it off in the model"
    )


def logits_of(outputs: object) -> Tensor:
    """The logits in a model's output: a tensor, or an object or mapping with `logits`.

    Raises:
        ConfigurationError: If there are none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = member(outputs, "logits")
    if isinstance(found, Tensor):
        return found
    if member(outputs, "loss") is not None:
        raise ConfigurationError(
            "compute_loss_func",
            None,
            "means the built-in loss, which is computed from logits, but the model returned a loss without "
            f"logits ({type(outputs).__name__})",
            "return logits, or let the model compute the loss with compute_loss_func=ModelLoss(count=...)",
        )
    raise ConfigurationError(
        "model",
        type(outputs).__name__,
        "is not a usable output: it is not a tensor, and has neither logits nor a loss",
        "return the logits as a tensor, or an object with the attribute logits",
    )


def loss_in(outputs: object) -> Tensor:
    """The loss that a model computed itself: an attribute or item `loss`, or the first of a tuple.

    Raises:
        ConfigurationError: If there is none, or if it is not a scalar.
    """
    found = member(outputs, "loss")
    if found is None:
        found = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    if isinstance(found, Tensor) and found.ndim == 0:
        return found
    shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(outputs).__name__
    raise ConfigurationError(
        "compute_loss_func",
        "ModelLoss",
        f"gave labels to the model, which returned {shown}, not a scalar loss",
        "return an object with a scalar loss, or leave compute_loss_func out to have the loss computed from "
        "logits",
    )


def member(outputs: object, name: str) -> object:
    """An item of a mapping or an attribute of another object; None where there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


class NextTokenLoss(ABC):
    """What losses of the next token share: they count and shift labels, and see targets only."""

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

    def make_targets(self, labels: Tensor) -> Tensor:
        """The next token of each position.

        Args:
            labels: Integers [batch, sequence], not shifted.

        Returns:
            int64 [batch, sequence]; the last of a row is -100.

        Raises:
            ConfigurationError: If the labels are something else.
        """
        check_next_token_labels(labels)
        return next_tokens(labels)

    @abstractmethod
    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses over what `make_targets` made, or any part of it: float32 scalar."""

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: As for `on_targets`.
            labels: Integers [batch, sequence], not shifted.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If predictions and labels do not belong together.
        """
        return self.on_targets(predictions, self.make_targets(labels))


class CausalLMLoss(NextTokenLoss):
    """Cross-entropy of the next token, in natural units (nats).

    Labels are not shifted beforehand: position t of the logits is compared with label t + 1, as in
    Hugging Face models. Labels of -100 do not count.

    Args:
        label_smoothing: Share of the target mass spread evenly over the vocabulary, 0 to 1.
        z_loss: Weight of the squared log-partition term of PaLM (Chowdhery et al. 2022, section 5).
    """

    def __init__(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses over what `make_targets` made, or any part of it.

        Args:
            predictions: Logits, floating [batch, sequence, vocabulary], or a model output that has them.
            targets: Integers [batch, sequence]; nothing is shifted.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If there are no logits, or not one prediction for each target.
        """
        logits = logits_of(predictions)
        check_next_token_logits(logits, targets)
        logits = logits.view(-1, logits.shape[-1]) if logits.is_contiguous() else logits.flatten(0, -2)
        if logits.dtype is not torch.float32:
            logits = logits.float()
        targets = targets.reshape(-1)
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
