"""What torch's schedules are given in place of stages, to learn their order without ranks or a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch


class StandInStage:
    """A stage without a module or neighbours, which notes what a schedule makes it do.

    Args:
        stage_index: Number of the stage in the pipeline.
        num_stages: Stages of the whole pipeline.
        rank: The rank that holds it.
        ranks: Ranks of the pipeline.
    """

    submod = None
    device = "cpu"
    # Neither first nor last: no input is asked for and no loss is computed.
    is_first = False
    is_last = False

    def __init__(self, stage_index: int, num_stages: int, rank: int, ranks: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_rank = rank
        self.group_size = ranks
        self.noted: list[tuple[Literal["F", "B"], int]] = []
        """(kind, microbatch) of each forward pass ("F") and full backward pass ("B"), in order."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        """Note a forward pass."""
        self.noted.append(("F", fwd_chunk_id))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        """Note a backward pass."""
        self.noted.append(("B", bwd_chunk_id))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        """Answer what else a schedule asks of a stage: no messages to send or await, nothing to prepare."""
        from torch.distributed.pipelining import PipelineStage

        if not hasattr(PipelineStage, name):
            raise AttributeError(f"a stage of torch has no {name!r}")
        return lambda *args, **kwargs: []


def stand_in_stages(count: int, rank: int, ranks: int) -> list[StandInStage]:
    """Return stand-ins for the `count` stages of a rank; their places do not change a schedule's table."""
    return [StandInStage(rank + ranks * i, ranks * count, rank, ranks) for i in range(count)]


def no_loss(*args: object, **kwargs: object) -> torch.Tensor:
    """Stand for a loss function: with one, torch takes the schedule for one that trains."""
    return torch.zeros(())
