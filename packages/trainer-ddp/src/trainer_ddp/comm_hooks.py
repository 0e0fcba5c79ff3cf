"""Communication hooks that average gradients over some ranks, or in a dry run over none."""

import socket
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dist_env import DistributedEnvInterface, gather_objects
from trainer_core import CommBytes

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with types.


class GroupAverageHook:
    """A communication hook that averages over the group in force at the moment.

    Args:
        groups: Groups by the name of their scope.
        scope: Tells the scope of this step.
        traffic: Counts what is sent.
    """

    def __init__(
        self, groups: Mapping[str, ProcessGroup], scope: Callable[[], str], traffic: CommBytes
    ) -> None:
        self._groups = groups
        self._scope = scope
        self._traffic = traffic

    def reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; DDP asks for this signature."""
        self._traffic.add(bucket.buffer())
        return allreduce_hook(self._groups[self._scope()], bucket)


def sum_fake(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Ask for the sum of a bucket, as DDP does by itself where a backend answers; in a dry run none does."""
    dist.all_reduce(bucket.buffer(), group=group)
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


def node_group(env: DistributedEnvInterface) -> ProcessGroup | None:
    """A group of the ranks on this host; none if this rank is alone there. Collective among all ranks."""
    if env.world_size == 1:
        return None
    hosts = gather_objects(socket.gethostname(), env)
    mine = None
    # Every rank has to take part in making every group.
    for host in sorted(set(hosts)):
        ranks = [rank for rank, its_host in enumerate(hosts) if its_host == host]
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if env.rank in ranks:
            mine = group
    return mine
