"""What every way of making gradients smaller has in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from checkpoint_core import StateComponent
from trainer_core import Traffic

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with types.


class GradientCompression(ABC):
    """Takes over the averaging of gradients from DistributedDataParallel.

    Order of calls: `register` once, before the first backward pass; a checkpoint's state, if there is one;
    then `begin` when training begins and after each optimizer step.

    Args:
        process_group: The ranks that average; none for the default group.
        traffic: Counts what this rank sends.
    """

    def __init__(self, process_group: ProcessGroup | None, traffic: Traffic) -> None:
        # A ProcessGroup: without a default group, torch refuses here.
        self._ranks = dist.distributed_c10d._get_default_group() if process_group is None else process_group
        self._traffic = traffic

    def register(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of a wrapped model.

        Args:
            ddp: The wrapper around the model that the compression was built for.

        Raises:
            RuntimeError: If the wrapper has a hook already.
        """
        ddp.register_comm_hook(None, self._reduce)

    def begin(self, step: int) -> None:
        """Note how far training is.

        Args:
            step: Optimizer steps done, of the whole training: it goes on from the checkpoint after a restart.
        """
        return

    def state_components(self) -> Sequence[StateComponent]:
        """What must survive a restart; no component for a method that remembers nothing."""
        return ()

    def state_dict(self) -> dict[str, object]:
        """What this rank remembers; empty for a method that remembers nothing."""
        return {}

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Put back what this rank saved."""
        return

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        """Take up what another number of ranks saved.

        Args:
            states: What `state_dict` returned on each of them, in rank order.
            rank: This rank.
            world_size: Number of ranks now.
        """
        return

    @abstractmethod
    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients over the ranks, in place. DDP asks for this signature."""

    def _reduce_whole(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does by itself, and count it."""
        self._traffic.add(bucket.buffer())
        return allreduce_hook(self._ranks, bucket)
