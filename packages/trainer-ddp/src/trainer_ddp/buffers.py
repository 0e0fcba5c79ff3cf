"""One set of buffers for evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


@contextmanager
def buffers_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> Iterator[None]:
    """Give every rank the buffers of the first, such as running means; collective at entry.

    Each rank sees other batches, so these drift apart within a step. Afterwards each has its own again.
    """
    buffers = [] if group is None else list(model.buffers())
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, own, strict=True):
                buffer.copy_(before)
