"""One set of weights and buffers, where each rank has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a model; others, such as caches, are each rank's own affair."""
    buffers = {id(buffer) for buffer in model.buffers()}
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in saved.items() if id(value) in buffers}


@torch.no_grad()
def copy_weights_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> None:
    """Overwrite parameters and saved buffers of all ranks by those of the first; collective."""
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *saved_buffers(model).values()):
        dist.broadcast(tensor, src=source, group=group)


@contextmanager
def buffers_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> Iterator[None]:
    """Give every rank the saved buffers of the first, such as running means; collective at entry.

    Each rank sees other batches, so these drift apart within a step. Afterwards each has its own again.
    """
    buffers = [] if group is None else list(saved_buffers(model).values())
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, own, strict=True):
                buffer.copy_(before)
