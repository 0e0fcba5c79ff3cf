"""The forward and backward passes of a step, and when gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..arguments import TrainingArguments
from ..data.batch import Batch, labels_of, to_device
from ..loss import TokenLoss, predict
from ..precision.autocast import autocast

Fire = Callable[[str], object]
"""Fires an event of the trainer by its name."""


class ForwardOutput(NamedTuple):
    """A batch after the forward pass."""

    loss: Tensor
    """Sum of the token losses: float32 scalar on the device."""
    predictions: object
    """What the loss was computed from, usually logits [batch, sequence, vocabulary]."""


class Executor(Protocol):
    """Runs the model that this rank holds."""

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Run the model on one batch and score it, without gradients; ranks of one replica do so together.

        Args:
            batch: Its `labels` are what the loss is called with: labels, or targets made of them.
            loss: Sum-and-count loss.

        Returns:
            The scores; None on a rank that does not hold the end of the model.
        """
        ...

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Fire
    ) -> Tensor:
        """Run all microbatches of an optimizer step forward and backward.

        Args:
            batches: The microbatches of this rank; `labels` as for `forward`.
            loss: Sum-and-count loss.
            denominator: What the sum of the losses is divided by before the backward pass: the tokens that
                count in the whole step over all ranks, at least 1, over the scale of the gradients.
            fire: Told `on_forward_backward_begin` and `on_forward_backward_end` around what runs as one.

        Returns:
            Sum of the token losses of this rank's data, detached: scalar on the device.
        """
        ...


class GradSync:
    """When gradients are summed over the ranks that share or replicate a part of the model; here never.

    An executor tells it of every backward pass of every part: the model, or a stage of it.
    """

    mean_over: int = 1
    """Of how many ranks the mean is taken where the sum is wanted: losses are multiplied by it."""

    def module(self, part: nn.Module) -> nn.Module:
        """What to call for a part in training: the part, or a wrapper of it."""
        return part

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        """A part is about to compute a microbatch; before its forward pass where that comes right before.

        Args:
            part: The part.
            last: Whether it is the last microbatch of the optimizer step.
        """

    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        """A part has computed the gradients of a microbatch."""

    def finish(self) -> None:
        """The gradients of all parts have to be complete."""


class EagerExecutor:
    """One microbatch after another, each forward and then backward.

    Args:
        model: The model that this rank holds.
        args: Precision settings.
        device: Where it computes.
        sync: Tells when gradients are summed over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        device: torch.device,
        sync: Callable[[], GradSync] = GradSync,
    ) -> None:
        self.model = model
        self._sync = sync
        self._autocast = autocast(args, device.type)
        self._device = device

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput:
        """Run the model on one batch and score it."""
        return self._run(self.model, batch, loss)

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Fire
    ) -> Tensor:
        """Run all microbatches of an optimizer step forward and backward."""
        sync = self._sync()
        module = sync.module(self.model)
        share = denominator if sync.mean_over == 1 else denominator / sync.mean_over
        sums = []
        for number, batch in enumerate(batches, start=1):
            fire("on_forward_backward_begin")
            last = number == len(batches)
            sync.before_backward(self.model, last=last)
            total = self._run(module, batch, loss).loss
            (total / share).backward()  # type: ignore[no-untyped-call]
            sync.after_backward(self.model, last=last)
            sums.append(total.detach())
            fire("on_forward_backward_end")
        sync.finish()
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _run(self, module: nn.Module, batch: Batch, loss: TokenLoss) -> ForwardOutput:
        inputs = to_device(batch, self._device)
        labels = labels_of(inputs)
        del inputs["labels"]
        with self._autocast:
            predictions = predict(loss, module, inputs, labels)
        return ForwardOutput(loss(predictions, labels), predictions)
