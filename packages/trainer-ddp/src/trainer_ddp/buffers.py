"""One set of buffers for evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from checkpoint_core import ModelState


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that belong to the state of a model; others, such as caches, are each rank's own affair."""
    return [value for value in ModelState(model).tensors().values() if not isinstance(value, nn.Parameter)]


@contextmanager
def buffers_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> Iterator[None]:
    """Give every rank the saved buffers of the first, such as running means; collective at entry.

    Each rank sees other batches, so these drift apart within a step. Afterwards each has its own again.
    """
    buffers = [] if group is None else saved_buffers(model)
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, own, strict=True):
                buffer.copy_(before)
