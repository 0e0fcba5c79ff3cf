"""Gradients that several ranks have: of the copies of a stage, and of weights that two stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer_core import fsdp_modules

_BUCKET = 25 * 2**20
"""Bytes that travel as one message; what torch's DDP takes as well."""


class Copies(Protocol):
    """The copies of a rank's stages, whose gradients are added up when the last one of a step is there."""

    def before_backward(self, stage: int, *, last: bool) -> None:
        """A stage is about to compute gradients, the last ones of the step or others."""

    def after_last(self, stage: int) -> None:
        """A stage has computed its last gradients of the step."""

    def finish(self) -> None:
        """The gradients of all stages of this rank have to be complete."""


class NoCopies:
    """One pipeline."""

    def before_backward(self, stage: int, *, last: bool) -> None:
        """Nothing."""

    def after_last(self, stage: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class ShardedCopies:
    """Ranks that share the weights of a stage: torch adds up while it computes.

    Args:
        stages: The stages of this rank.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._units = {number: fsdp_modules(stage) for number, stage in stages.items()}

    def before_backward(self, stage: int, *, last: bool) -> None:
        """Send gradients, and drop gathered weights, with the last ones only."""
        for unit in self._units[stage]:
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last, recurse=False)
            unit.set_reshard_after_backward(last, recurse=False)

    def after_last(self, stage: int) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        """Nothing is left to do."""

    def drop(self) -> None:
        """Let go of gathered weights, so that parameters are this rank's shards again."""
        for units in self._units.values():
            for unit in units:
                unit.reshard()


class HeldCopies:
    """Ranks that each hold all weights of a stage: adds up while other stages still compute.

    Args:
        stages: The stages of this rank.
        group: The ranks with the same stages.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: ProcessGroup) -> None:
        self._stages = stages
        self._group = group
        self._under_way: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []

    def before_backward(self, stage: int, *, last: bool) -> None:
        """Nothing."""

    @torch.no_grad()
    def after_last(self, stage: int) -> None:
        """Begin to add up the gradients of the stage; collective among the copies."""
        gradients = []
        for parameter in self._stages[stage].parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    # Another copy may have used it.
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append((work, flat, bucket))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums and put them into the gradients."""
        for work, flat, bucket in self._under_way:
            if work is not None:
                work.wait()
            pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self._under_way.clear()


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = {}
    for gradient in gradients:
        buckets = by_dtype[gradient.dtype]
        if not buckets or sizes[gradient.dtype] + gradient.nbytes > _BUCKET:
            buckets.append([])
            sizes[gradient.dtype] = 0
        buckets[-1].append(gradient)
        sizes[gradient.dtype] += gradient.nbytes
    return [bucket for buckets in by_dtype.values() for bucket in buckets]
