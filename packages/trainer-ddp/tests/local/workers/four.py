"""What four ranks on two hosts do together."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from jobs import Job, gathered, post_local, same


class Four:
    """The scenarios of one rank."""

    def __init__(self, directory: Path) -> None:
        self.group: dist.ProcessGroup = dist.group.WORLD
        nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.node = nodes[dist.get_rank() // 2]

    def nodes(self) -> object:
        """For each step: which gradients are averaged, and which ranks have the weights of which."""
        job = Job(post_local(1, 3, node=True), "sgd", group=self.group, node=self.node)
        job.local.begin(0)
        seen = []
        for _ in range(4):
            scope = job.local.gradient_scope
            job.train(1)
            weights = {name: p.detach() for name, p in job.model.named_parameters()}
            everybody = gathered(weights, self.group)
            equal = [same(everybody[0], other) for other in everybody[1:]]
            seen.append([scope, *equal, same(everybody[2], everybody[3])])
        return seen
