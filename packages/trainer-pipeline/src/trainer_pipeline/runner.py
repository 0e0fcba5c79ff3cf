"""What a stage computes for a microbatch, and what it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer_core import TokenLoss, TrainingArguments, autocast, predict

from .blocks import Bound
from .microbatches import Microbatch


@dataclass
class Feed:
    """What the stages of a rank work on in a step."""

    args: TrainingArguments
    loss: TokenLoss
    microbatches: Sequence[Microbatch] = ()
    divisor: Tensor | float = 1.0
    """What the losses are divided by before the backward pass."""
    losses: list[Tensor] = field(default_factory=list)
    """Sums of the token losses of the microbatches, where the last stage is."""

    def fill(
        self, loss: TokenLoss, microbatches: Sequence[Microbatch], divisor: Tensor | float = 1.0
    ) -> None:
        """Put in what is to be worked on."""
        self.loss, self.microbatches, self.divisor = loss, microbatches, divisor

    def empty(self) -> None:
        """Let go of it."""
        self.microbatches = ()
        self.losses.clear()


class Runner(nn.Module):
    """A stage with everything that it needs beside the hidden state.

    Args:
        stage: Called as `stage(hidden, **inputs)`.
        model: The model, for losses that ask it for things.
        last: Whether it is the last stage, which computes the loss.
        feed: The microbatches.
        device: Where it computes.
    """

    def __init__(
        self, stage: nn.Module, model: nn.Module, feed: Feed, device: torch.device, *, last: bool
    ) -> None:
        super().__init__()
        self.stage = stage
        self.place = 0
        """Which microbatch is computed next."""
        self._model = (model,)
        self._feed = feed
        self._device = device
        self._last = last

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        """The hidden state, or the loss of the microbatch over the divisor."""
        if self._last:
            total, _ = self.score(hidden)
            self._feed.losses.append(total.detach())
            return total / self._feed.divisor
        with autocast(self._feed.args, self._device.type):
            return checked_hidden(self.stage(hidden, **self._microbatch.inputs))

    def score(self, hidden: Tensor | None) -> tuple[Tensor, object]:
        """For the last stage: the sum of the token losses of the microbatch, and the predictions."""
        feed, microbatch = self._feed, self._microbatch
        bound = Bound(self.stage, self._model[0], hidden)
        with autocast(feed.args, self._device.type):
            predictions = predict(feed.loss, bound, microbatch.inputs, microbatch.labels)
        return feed.loss(predictions, microbatch.labels), predictions

    @property
    def _microbatch(self) -> Microbatch:
        return self._feed.microbatches[self.place]


def checked_hidden(output: object) -> Tensor:
    """What a stage hands on.

    Raises:
        TypeError: If it is no tensor.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a stage returned a {type(output).__name__}; every stage but the last one must return the "
            "hidden state, one tensor"
        )
    return output.contiguous()
