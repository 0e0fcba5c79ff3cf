"""The ranks of one host, as a process group."""

from __future__ import annotations

import socket

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dist_env import DistributedEnvInterface, gather_objects


def group_of_host(env: DistributedEnvInterface) -> ProcessGroup | None:
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
