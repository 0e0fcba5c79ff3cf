"""Buffers that several ranks have, and that training changes on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer_core import saved_buffers

from .blocks import BlockStage
from .building import Built


@contextmanager
def buffers_of_their_stages(built: Built, group: ProcessGroup, last_rank: int) -> Iterator[None]:
    """Give all ranks of a pipeline one set of buffers before and after the blocks: that of the stage in use.

    Every rank computes what comes before the blocks, but only the first stage does so with its weights.
    Collective at entry; afterwards each rank has its own again.

    Args:
        built: What this rank holds.
        group: The ranks of the pipeline.
        last_rank: The one with the last stage.
    """
    buffers = _outside(built)
    own = [buffer.clone() for buffer, _ in buffers]
    for buffer, comes_after in buffers:
        dist.broadcast(buffer, group=group, group_src=last_rank if comes_after else 0)
    try:
        yield
    finally:
        with torch.no_grad():
            for (buffer, _), before in zip(buffers, own, strict=True):
                buffer.copy_(before)


def _outside(built: Built) -> list[tuple[Tensor, bool]]:
    """Saved buffers outside of the blocks, and whether they come after them."""
    stage = next(iter(built.stages.values()))
    if built.row is None or not isinstance(stage, BlockStage):
        return []
    after = {id(buffer) for module in stage.around[1] for buffer in module.buffers()}
    found = saved_buffers(built.model).items()
    return [
        (buffer, id(buffer) in after) for name, buffer in found if not name.startswith(f"{built.row.path}.")
    ]
