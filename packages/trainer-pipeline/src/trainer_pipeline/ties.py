"""Weights that stages on several ranks have in common, such as embedding and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer_core import own_part

from .building import Built


class SharedWeights:
    """Weights that stages on different ranks have in common, such as embedding and head.

    Each rank has a copy and steps it alike; their gradients are added up.

    Args:
        parameters: This rank's copies by name.
        groups: For each name the ranks that have one; also for names that this rank does not have.
        owned: Names of those copies that count in the norm of the gradient: each on one rank.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        groups: dict[str, ProcessGroup],
        owned: set[str],
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._owned = owned

    @property
    def copies(self) -> list[nn.Parameter]:
        """Those of this rank that another rank counts."""
        return [parameter for name, parameter in self._parameters.items() if name not in self._owned]

    @torch.no_grad()
    def add_up(self) -> None:
        """Add up their gradients; collective among those who have them."""
        for name in sorted(self._parameters):
            parameter = self._parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(own_part(parameter.grad), group=self._groups[name])


def shared_weights(built: Built, mesh: DeviceMesh, rank: int) -> SharedWeights:
    """Find the weights that several ranks of a pipeline have; collective.

    Args:
        built: What this rank holds.
        mesh: All ranks, (pipeline, copies).
        rank: This rank, in its pipeline.
    """
    shared = {name: tuple(holders) for name, holders in built.holders.items() if len(holders) > 1}
    groups = {
        holders: own_group(mesh.mesh[list(holders)].T.tolist()) for holders in sorted(set(shared.values()))
    }
    mine: dict[str, nn.Parameter] = {}
    by_name: dict[str, ProcessGroup] = {}
    for name, parameter in built.model.named_parameters():
        group = groups.get(shared.get(name, ()))
        if group is not None:
            mine[name], by_name[name] = parameter, group
    return SharedWeights(mine, by_name, {name for name in mine if shared[name][0] == rank})


def own_group(all_ranks: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Make a group of each of some lists of ranks; the one that this rank is in, if any. Collective."""
    own = None
    for ranks in all_ranks:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own
