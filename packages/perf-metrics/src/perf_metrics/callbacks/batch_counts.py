"""Counts the tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .lightning_run import Strategy

if TYPE_CHECKING:
    from torch import Tensor


class TokenCounts(NamedTuple):
    """Tokens of one batch on one rank, as integers or as tensors of one element on any device.

    Attributes:
        input_tokens: Input positions without padding.
        compute_tokens: All positions, padding included.
        tokens: Positions that the loss counts; None where this is not known.
    """

    input_tokens: int | Tensor
    compute_tokens: int | Tensor
    tokens: int | Tensor | None = None


TokenCounter: TypeAlias = Callable[[object], TokenCounts]


def count_batch(batch: object) -> TokenCounts | None:
    """Count the tokens of a batch of the usual layouts, without waiting for the device.

    Args:
        batch: A mapping with `input_ids`, an integer tensor [..., S], and perhaps an `attention_mask` and
            `labels` of the same shape; or an integer tensor of token ids; or a tuple or list that begins with
            one of these. Labels are not shifted yet, and -100 marks what the loss leaves out.

    Returns:
        The counts, or None for a batch that is none of these.
    """
    import torch

    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        return count_batch(batch[0])
    if isinstance(batch, torch.Tensor):
        return _count_ids(batch)
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
        return None
    ids: Tensor = batch["input_ids"]
    counts = _count_ids(ids)
    if counts is None:
        return None
    mask, labels = (_of_shape(batch.get(name), ids) for name in ("attention_mask", "labels"))
    return TokenCounts(
        input_tokens=counts.input_tokens if mask is None else (mask != 0).sum(),
        compute_tokens=counts.compute_tokens,
        tokens=None if labels is None else (labels[..., 1:] != -100).sum(),
    )


def _count_ids(ids: Tensor) -> TokenCounts | None:
    if ids.is_floating_point() or ids.is_complex():
        return None
    return TokenCounts(ids.numel(), ids.numel())


def _of_shape(value: object, ids: Tensor) -> Tensor | None:
    import torch

    return value if isinstance(value, torch.Tensor) and value.shape == ids.shape else None


class IntervalSums:
    """Sums the counts and the losses of the batches of a log interval, on the device."""

    def __init__(self) -> None:
        self._counts: dict[str, int | Tensor] = {}
        self._loss: float | Tensor = 0.0
        self._losses = 0

    def add(self, counts: TokenCounts | None, loss: Tensor | None) -> None:
        """Add a batch."""
        if counts is not None:
            for name, value in counts._asdict().items():
                if value is not None:
                    self._counts[name] = self._counts.get(name, 0) + value
        if loss is not None:
            self._loss = self._loss + loss.detach().float()
            self._losses += 1

    def over_ranks(self, strategy: Strategy) -> dict[str, int | float]:
        """Return `loss`, the mean over batches and ranks, and the token counts summed over ranks.

        A collective call that waits for the device.
        """
        import torch

        record: dict[str, int | float] = {}
        device = strategy.root_device
        if self._losses:
            mean = torch.as_tensor(self._loss, device=device) / self._losses
            record["loss"] = float(strategy.reduce(mean, reduce_op="mean"))
        if self._counts:
            sums = torch.tensor([int(value) for value in self._counts.values()], device=device)
            totals = strategy.reduce(sums, reduce_op="sum").tolist()
            record |= {name: int(total) for name, total in zip(self._counts, totals, strict=True)}
        return record
