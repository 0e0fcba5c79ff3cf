"""The ranks of one host, as a process group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dist_env import DistributedEnvInterface
from trainer_core import DataParallel


def group_of_host(parallel: DataParallel) -> ProcessGroup | None:
    """A group of the ranks on this host; none if this rank is alone there. Collective among all ranks.

    Args:
        parallel: Knows the ranks; those of one host have the same first rank.
    """
    env: DistributedEnvInterface = parallel.env
    if env.world_size == 1:
        return None
    firsts = [int(first) for (first,) in parallel.gather([float(env.rank - env.local_rank)])]
    mine = None
    # Every rank has to take part in making every group.
    for first in sorted(set(firsts)):
        ranks = [rank for rank, its_first in enumerate(firsts) if its_first == first]
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if env.rank in ranks:
            mine = group
    return mine
