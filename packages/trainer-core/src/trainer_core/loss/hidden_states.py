"""A loss of one's own that works on hidden states and the output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..errors import ConfigurationError
from .head import HeadBypass, checked_head
from .token_loss import TokenLoss

FusedLossFactory = Callable[[nn.Module], TokenLoss]
"""Called with the output head; gives a sum-and-count loss of `(hidden states, labels)`."""


class HiddenStatesLoss:
    """Gives a loss the input of the model's output head in place of the logits.

    Args:
        head: The output head, a plain nn.Linear.
        factory: Makes the loss from the head.

    Raises:
        ConfigurationError: If the head is no plain linear layer, or the factory gives no sum-and-count loss.
    """

    def __init__(self, head: nn.Module, factory: FusedLossFactory) -> None:
        checked = checked_head(head)
        loss = factory(checked)
        if not callable(loss) or not callable(getattr(loss, "count", None)):
            raise ConfigurationError(
                "fused_loss_factory",
                loss,
                "must give a loss that returns a sum and tells how many positions count",
                "return an object with __call__(hidden, labels) and count(labels)",
            )
        self.loss = loss
        self._bypass = HeadBypass(checked)

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar."""
        return self.loss.count(labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> Tensor:
        """Run the model up to its output head: hidden states [batch, sequence, features]."""
        return self._bypass.hidden_states(model, inputs)

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses: float32 scalar."""
        return self.loss(predictions, labels)
