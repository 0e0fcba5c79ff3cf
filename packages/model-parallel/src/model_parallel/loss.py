"""Cross-entropy whose vocabulary is divided over ranks: no rank ever has all logits of a token.

For one token with logits x over V classes, m = logsumexp(x) and target y, the loss is

    m - (1 - s) x_y - s mean(x) + z m^2        s: label smoothing, z: weight of the z-loss

and its gradient with respect to x is

    softmax(x) (1 + 2 z m) - (1 - s) onehot(y) - s / V.

Each rank has some of the classes. For each token three numbers travel: the maximum of its logits, then the
sum of exponentials and the logit of its target (with label smoothing also the sum of logits).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .attention import can_look_at
from .plan import PlanError
from .structure import local_size
from .styles import Colwise, check_ties, styles_of

IGNORE_INDEX = -100
_LOGITS_AT_A_TIME = 2**24


@dataclass(frozen=True)
class _Settings:
    group: ProcessGroup
    vocabulary: int
    first: int
    label_smoothing: float
    z_loss: float
    rows: int = 0


def sharded_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Sum of the cross-entropies of logits that are divided by the vocabulary; collective.

    Args:
        logits: DTensor [batch, sequence, vocabulary], or any shape with the vocabulary last, divided by it
            over a mesh of one dimension, as a model returns that was divided with `loss=True`.
        targets: int64 [batch, sequence], the same on each rank; -100 does not count. Nothing is shifted.
        label_smoothing: Share of the target mass spread evenly over the whole vocabulary, 0 to 1.
        z_loss: Weight of the squared logsumexp (Chowdhery et al. 2022, section 5).

    Returns:
        float32 scalar, the same on each rank. Divide it by the number of targets that count.

    Raises:
        PlanError: The logits are not divided by the vocabulary, or shapes differ.
        IndexError: A target is outside the vocabulary. On an accelerator, where looking would wait for the
            device, the loss becomes NaN instead.
    """
    if not isinstance(logits, DTensor) or logits.placements != (Shard(logits.ndim - 1),):
        raise PlanError(
            "logits must be a DTensor divided by the vocabulary, as a model returns that shard_tensors(..., "
            "loss=True) has divided. For whole logits use torch.nn.functional.cross_entropy."
        )
    if logits.shape[:-1] != targets.shape:
        raise PlanError(
            f"targets has the shape {list(targets.shape)}, and the logits {list(logits.shape)}. Give one "
            "target for each place of the logits."
        )
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    _check_settings(label_smoothing, z_loss)
    first, _ = local_size(vocabulary, mesh.size(), mesh.get_local_rank())
    settings = _Settings(mesh.get_group(), vocabulary, first, label_smoothing, z_loss)
    local, flat = logits.to_local(), targets.reshape(-1)
    _check_targets(flat, vocabulary)
    return _cross_entropy(local.reshape(-1, local.shape[-1]), flat, settings)


def is_sharded_head(module: nn.Module) -> bool:
    """Whether `sharded_linear_cross_entropy` takes a layer: `shard_tensors` has divided it by its outputs."""
    return _head_style(module) is not None and isinstance(module.weight, DTensor)


def _head_style(module: nn.Module) -> Colwise | None:
    style = next((each for each in styles_of(module) if isinstance(each, Colwise)), None)
    return style if style is not None and style.rows is None else None


def sharded_linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Output head and cross-entropy in one, some tokens at a time: logits never exist whole; collective.

    Same number as `sharded_cross_entropy` of the head's logits. A head whose weight `fully_shard` divides
    too is gathered from those ranks, and its gradient is their sum: give FSDP a gradient divide factor of 1.

    Args:
        hidden: What the head is given: floating [batch, sequence, features], this rank's part of the
            sequence if the model was divided with `sequence=True`.
        head: The output head of a model that `shard_tensors` has divided, of the style
            "colwise_gather_output".
        targets: int64 [batch, sequence], the whole sequence, the same on each rank; -100 does not count.
        label_smoothing: Share of the target mass spread evenly over the whole vocabulary, 0 to 1.
        z_loss: Weight of the squared logsumexp (Chowdhery et al. 2022, section 5).
        chunk_tokens: Tokens at a time; None: as many as make 64 MiB of logits in float32 on a rank.

    Returns:
        float32 scalar, the same on each rank. It can be differentiated once.

    Raises:
        PlanError: The head is not divided, or shapes differ.
        IndexError: As for `sharded_cross_entropy`.
    """
    style = _head_style(head)
    if style is None or not isinstance(head, nn.Linear) or not is_sharded_head(head):
        raise PlanError(
            f"head={type(head).__name__} is not divided by its outputs. Give the output head of a model that "
            "shard_tensors has divided, whose style is 'colwise_gather_output'."
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise PlanError(
            f"chunk_tokens={chunk_tokens} must be at least 1. Set it to 1 or more, or leave it out."
        )
    _check_settings(label_smoothing, z_loss)
    check_ties(head)
    whole = style.enter(hidden)
    if whole.shape[:-1] != targets.shape:
        raise PlanError(
            f"targets has the shape {list(targets.shape)}, and the whole hidden states {list(whole.shape)}. "
            "Give one target for each token of the whole sequence."
        )
    mesh, vocabulary = style.mesh, style.width
    first, count = local_size(vocabulary, mesh.size(), mesh.get_local_rank())
    rows = chunk_tokens or max(1, _LOGITS_AT_A_TIME // count)
    settings = _Settings(mesh.get_group(), vocabulary, first, label_smoothing, z_loss, rows)
    flat = targets.reshape(-1)
    _check_targets(flat, vocabulary)
    bias = None if head.bias is None else _own_rows(head.bias)
    return _linear_cross_entropy(
        whole.reshape(-1, whole.shape[-1]), _own_rows(head.weight), bias, flat, settings
    )


def _own_rows(weight: Tensor) -> Tensor:
    """This rank's rows of a head, gathered over all dimensions but the last, which is the one of tensors."""
    if not isinstance(weight, DTensor):
        return weight
    others = weight.device_mesh.ndim - 1
    if not others:
        return weight.to_local()
    rows = weight.redistribute(placements=[*[Replicate()] * others, Shard(0)])
    return rows.to_local(grad_placements=[*[Partial()] * others, Shard(0)])


def _check_settings(label_smoothing: float, z_loss: float) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise PlanError(f"label_smoothing={label_smoothing} must be from 0 to 1. Set it such as 0.1.")
    if not 0.0 <= z_loss < float("inf"):
        raise PlanError(f"z_loss={z_loss} must be 0 or more. Set it such as 1e-4.")


def _outside(targets: Tensor, vocabulary: int) -> Tensor:
    return (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= vocabulary))


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    if can_look_at(targets) and bool((wrong := _outside(targets, vocabulary)).any()):
        raise IndexError(f"The target {int(targets[wrong][0])} is outside the vocabulary of {vocabulary}.")


def _losses(logits: Tensor, targets: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Losses of tokens, and the gradients of their logits.

    Args:
        logits: This rank's [rows, classes], float32 or float64. They become their gradients.
        targets: int64 [rows].
        settings: What loss it is.

    Returns:
        Losses [rows], the same on each rank, 0 for those that do not count; and the gradients.
    """
    smoothing, vocabulary, group = settings.label_smoothing, settings.vocabulary, settings.group
    counted = targets != IGNORE_INDEX
    top = logits.amax(dim=-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    own = targets - settings.first
    mine = counted & (own >= 0) & (own < logits.shape[-1])
    own = own.masked_fill(~mine, 0).unsqueeze(-1)
    sums = logits.new_zeros(3 if smoothing else 2, len(logits))
    sums[1] = logits.gather(1, own).squeeze(-1).masked_fill(~mine, 0.0)
    if smoothing:
        sums[2] = logits.sum(dim=-1)
    sums[0] = logits.sub_(top.unsqueeze(-1)).exp_().sum(dim=-1)
    dist.all_reduce(sums, group=group)
    partition = sums[0].log() + top
    losses = partition - (1.0 - smoothing) * sums[1]
    weights = sums[0].reciprocal()
    if smoothing:
        losses -= smoothing * sums[2] / vocabulary
    if settings.z_loss:
        losses += settings.z_loss * partition.square()
        weights = weights * (1.0 + 2.0 * settings.z_loss * partition)
    gradient = logits.mul_(weights.unsqueeze(-1))
    if smoothing:
        gradient -= smoothing / vocabulary
    gradient.scatter_add_(1, own, (mine * (smoothing - 1.0)).to(gradient.dtype).unsqueeze(-1))
    gradient.masked_fill_(~counted.unsqueeze(-1), 0.0)
    losses = losses.masked_fill(~counted, 0.0).masked_fill(_outside(targets, vocabulary), float("nan"))
    return losses, gradient


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class _Saved(FunctionCtx):
    """What autograd hands to a function, as far as torch does not declare it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """None is kept as it is."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Saved, logits: Tensor, targets: Tensor, settings: _Settings) -> Tensor:
        wide = logits.to(_wide(logits.dtype), copy=True)
        losses, gradient = _losses(wide, targets, settings)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * scale).to(gradient.dtype), None, None


_cross_entropy: Callable[[Tensor, Tensor, _Settings], Tensor] = _CrossEntropy.apply


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Saved, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> Tensor:
        wide = _wide(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        matrix = weight.to(hidden.dtype)
        for start in range(0, len(hidden), settings.rows):
            chunk = slice(start, start + settings.rows)
            part = hidden[chunk]
            logits = (part @ matrix.t()).to(wide)
            if bias is not None:
                logits += bias
            losses, gradient = _losses(logits, targets[chunk], settings)
            total += losses.sum()
            if d_bias is not None:
                d_bias += gradient.sum(dim=0)
            low = gradient.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[chunk] = low @ matrix
            if d_weight is not None:
                d_weight += low.t() @ part
        found = [d_hidden, d_weight, d_bias]
        ctx.save_for_backward(*found)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scaled = [None if each is None else (each * scale).to(each.dtype) for each in (hidden, weight, bias)]
        return (*scaled, None, None)


_linear_cross_entropy: Callable[[Tensor, Tensor, Tensor | None, Tensor, _Settings], Tensor] = (
    _LinearCrossEntropy.apply
)
