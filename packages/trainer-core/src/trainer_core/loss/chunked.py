"""Cross-entropy of a linear layer's output, a few rows at a time, so that the logits never exist whole.

For one row with logits x over V classes, m = logsumexp(x) and target y, the loss is

    m - (1 - s) x_y - s mean(x) + z m^2        s: label smoothing, z: weight of the z-loss

and its gradient with respect to x is

    softmax(x) (1 + 2 z m) - (1 - s) onehot(y) - s / V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .token_loss import IGNORE_INDEX

LOGITS_AT_A_TIME = 2**24
"""Most logits that exist at one time: 64 MiB in float32."""


_SCALED_ROWS = 4096
"""Rows of a 16-bit gradient that are scaled in float32 at a time."""


@dataclass(frozen=True)
class ChunkedOptions:
    """How `chunked_linear_cross_entropy` computes.

    Attributes:
        compute_dtype: Dtype of the matrix products; sums and the softmax are float32, or float64 for it.
        label_smoothing: Share of the target mass spread evenly over the vocabulary.
        z_loss: Weight of the squared logsumexp.
        rows: Rows at a time; none: as many as `LOGITS_AT_A_TIME` allows.
    """

    compute_dtype: torch.dtype
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    rows: int | None = None


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkedOptions
) -> Tensor:
    """Sum of the cross-entropies of `hidden @ weight.T + bias` and the targets.

    Gradients are computed along with the loss, while a chunk's logits are there, and scaled in backward.
    For float16 they are computed in backward from logits made anew: there the incoming gradient, which holds
    the scale that keeps float16 from underflow, is known. A second backward of the same graph does that too.

    Args:
        hidden: Floating [rows, features].
        weight: Floating [vocabulary, features].
        bias: Floating [vocabulary], or None.
        targets: int64 [rows]; rows of -100 do not count.
        options: Precision, smoothing, z-loss and chunk size.

    Returns:
        Scalar, float32 (float64 when computed in float64). It can be differentiated once.
    """
    inputs = (hidden, weight, bias)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
    return _ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, options, wanted)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    gradients: list[Tensor | None] | None
    options: ChunkedOptions
    wanted: tuple[bool, ...]
    with_bias: bool


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    if TYPE_CHECKING:
        # torch's has no types.
        apply: ClassVar[
            Callable[[Tensor, Tensor, Tensor | None, Tensor, ChunkedOptions, tuple[bool, ...]], Tensor]
        ]

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ChunkedOptions,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        now = any(wanted) and options.compute_dtype is not torch.float16
        pass_ = _Pass(hidden, weight, bias, targets, options, wanted if now else (False,) * 3)
        total = pass_.run(scale=None)
        ctx.gradients = pass_.gradients() if now else None
        ctx.options, ctx.wanted, ctx.with_bias = options, wanted, bias is not None
        if any(wanted):
            ctx.save_for_backward(hidden, weight, targets, *([bias] if bias is not None else []))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ready, ctx.gradients = ctx.gradients, None
        if ready is not None:
            return (*[None if g is None else _scaled(g, gradient) for g in ready], None, None, None)
        hidden, weight, targets, *rest = ctx.saved_tensors
        again = _Pass(hidden, weight, rest[0] if rest else None, targets, ctx.options, ctx.wanted)
        again.run(scale=gradient)
        return (*again.gradients(), None, None, None)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient times a factor, in place: it is large, and nobody else holds it now.

    The factor is not rounded to 16 bits, which would err by the same share everywhere.
    """
    if gradient.dtype not in (torch.bfloat16, torch.float16):
        return gradient.mul_(factor.to(gradient.dtype))
    for rows in torch.split(gradient, _SCALED_ROWS):
        rows.copy_(rows.float() * factor)
    return gradient


class _Pass:
    """One walk over the chunks, with the buffers that all chunks share."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ChunkedOptions,
        wanted: tuple[bool, ...],
    ) -> None:
        low = options.compute_dtype
        self.wide = torch.float64 if low is torch.float64 else torch.float32
        self.hidden, self.targets, self.options = hidden, targets, options
        self.weight = weight.to(low)
        self.bias = None if bias is None else bias.to(low)
        count, vocabulary = hidden.shape[0], weight.shape[0]
        self.rows = max(1, min(count, options.rows or LOGITS_AT_A_TIME // vocabulary))
        self.logits = hidden.new_empty((self.rows, vocabulary), dtype=self.wide)
        self.products = self.logits if low is self.wide else hidden.new_empty(self.logits.shape, dtype=low)
        self.d_hidden = torch.empty_like(hidden) if wanted[0] else None
        self.d_weight = torch.zeros_like(weight, dtype=self.wide) if wanted[1] else None
        self.d_bias = hidden.new_zeros(vocabulary, dtype=self.wide) if wanted[2] else None
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)

    def run(self, scale: Tensor | None) -> Tensor:
        """Sum of the losses: scalar. Fills the wanted gradients, times `scale`."""
        total = self.hidden.new_zeros((), dtype=self.wide)
        differentiate = not (self.d_hidden is None and self.d_weight is None and self.d_bias is None)
        # Every dtype is chosen here; autocast would choose again.
        with torch.autocast(self.hidden.device.type, enabled=False):
            for chunk in self._chunks():
                hidden = self.hidden[chunk].to(self.options.compute_dtype)
                logits, ignored = self._logits(hidden), self.targets[chunk] == IGNORE_INDEX
                # Ignored rows get some label that exists; what they give is set to 0.
                target = self.targets[chunk].masked_fill(ignored, 0).unsqueeze(-1)
                losses, weights = self._losses(logits, target)
                total += losses.masked_fill_(ignored, 0.0).sum()
                if differentiate:
                    kept = (~ignored).to(self.wide)
                    self._differentiate(logits, target, weights, kept if scale is None else kept * scale)
                    self._collect(chunk, hidden, logits)
        return total

    def gradients(self) -> list[Tensor | None]:
        """Gradients of hidden, weight and bias in their own dtypes; None for those not wanted."""
        found = (self.d_hidden, self.d_weight, self.d_bias)
        return [None if g is None else g.to(d) for g, d in zip(found, self.dtypes, strict=True)]

    def _chunks(self) -> Iterator[slice]:
        count = self.hidden.shape[0]
        for start in range(0, count, self.rows):
            yield slice(start, min(start + self.rows, count))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of a chunk: [rows, vocabulary], rounded as the linear layer would round them."""
        products = self.products[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=products)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=products)
        logits = self.logits[: len(hidden)]
        return logits if products.dtype is logits.dtype else logits.copy_(products)

    def _losses(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [rows], and what the exponentials must be multiplied with [rows]; logits become those."""
        smoothing, z_loss = self.options.label_smoothing, self.options.z_loss
        top = logits.amax(dim=-1, keepdim=True)
        picked = logits.gather(1, target).squeeze(-1)
        mean = logits.mean(dim=-1) if smoothing else None
        total = logits.sub_(top).exp_().sum(dim=-1)
        partition = total.log().add_(top.squeeze(-1))
        if mean is None:
            losses = partition - picked
        else:
            losses = partition - (1.0 - smoothing) * picked - smoothing * mean
        weights = total.reciprocal()
        if z_loss:
            losses = losses + z_loss * partition.square()
            weights = weights * (1.0 + 2.0 * z_loss * partition)
        return losses, weights

    def _differentiate(self, exponentials: Tensor, target: Tensor, weights: Tensor, scale: Tensor) -> None:
        """Turn the exponentials of a chunk into the gradient of its logits, in place."""
        smoothing = self.options.label_smoothing
        gradient = exponentials.mul_((weights * scale).unsqueeze(-1))
        if smoothing:
            gradient.sub_((scale * (smoothing / gradient.shape[-1])).unsqueeze(-1))
        gradient.scatter_add_(1, target, (scale * (smoothing - 1.0)).unsqueeze(-1))

    def _collect(self, chunk: slice, hidden: Tensor, gradient: Tensor) -> None:
        """Add a chunk's part to the gradients."""
        if self.d_bias is not None:
            self.d_bias += gradient.sum(dim=0)
        low = self.products[: len(hidden)]
        if low.dtype is not gradient.dtype:
            gradient = low.copy_(gradient)
        if self.d_hidden is not None:
            part = self.d_hidden[chunk]
            if part.dtype is gradient.dtype:
                torch.mm(gradient, self.weight, out=part)
            else:
                part.copy_(gradient @ self.weight)
        if self.d_weight is not None:
            if self.d_weight.dtype is gradient.dtype:
                self.d_weight.addmm_(gradient.t(), hidden)
            else:
                self.d_weight += gradient.t() @ hidden
