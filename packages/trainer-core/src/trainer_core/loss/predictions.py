"""What a model returned, as a loss wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

from torch import Tensor, nn

from dist_env import get_logger

from ..errors import ConfigurationError
from .token_loss import TokenLoss

logger = get_logger(__name__)

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
    own = cast(Predict | None, getattr(loss, "predict", None))
    if own is not None:
        return own(model, inputs, labels)
    outputs = model(**inputs)
    if not isinstance(outputs, Tensor) and member(outputs, "aux_loss") is not None:
        _say_what_is_left_out()
    return logits_of(outputs)


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
            f"the model returned a loss but no logits ({type(outputs).__name__}), "
            "and the built-in loss is computed from logits",
            "return logits, or let the model compute the loss: compute_loss_func=ModelLoss(count=...)",
        )
    raise ConfigurationError(
        "model",
        type(outputs).__name__,
        "returned neither logits nor a loss: no tensor, and no object or mapping with one of these names",
        "return the logits as a tensor, or an object with the attribute logits",
    )


def loss_in(outputs: object) -> Tensor:
    """The loss that a model computed itself: an attribute or item `loss`, or the first of a tuple.

    Raises:
        ConfigurationError: If there is none, or if it is no scalar.
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
        f"the model was given labels and returned {shown}, not a scalar loss",
        "return an object with a scalar loss, or leave compute_loss_func out to have the loss computed from "
        "logits",
    )


def member(outputs: object, name: str) -> object:
    """An item of a mapping or an attribute of another object; None where there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
