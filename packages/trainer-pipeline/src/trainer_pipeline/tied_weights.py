"""Weights that stages on several ranks have in common, such as embedding and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from trainer_core import Ranks, own_part


class TiedWeights:
    """Weights of several stages: each rank has a copy and steps it alike, and gradients are added up.

    Args:
        holders: For each parameter, by its name in the model, the places of a pipeline that have it.
        ranks: The ranks; collective.
    """

    def __init__(self, holders: Mapping[str, Sequence[int]], ranks: Ranks) -> None:
        place = ranks.coordinates["pipeline"]
        tied = {name: tuple(places) for name, places in holders.items() if len(places) > 1}
        groups = {places: pipeline_subgroup(ranks, places) for places in sorted(set(tied.values()))}
        self._groups = {
            name: group
            for name, places in tied.items()
            if place in places and (group := groups[places]) is not None
        }
        self._owned = {name for name in self._groups if tied[name][0] == place}
        self._parameters: dict[str, nn.Parameter] = {}

    def attach(self, model: nn.Module) -> list[nn.Parameter]:
        """Find the copies of this rank, once nothing replaces parameters any more.

        Returns:
            Those that count in the norm of the gradient on another rank.
        """
        named = dict(model.named_parameters())
        self._parameters = {name: named[name] for name in sorted(self._groups)}
        return [copy for name, copy in self._parameters.items() if name not in self._owned]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add up their gradients; collective among those who have them."""
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(own_part(parameter.grad), group=self._groups[name])


def pipeline_subgroup(ranks: Ranks, places: Sequence[int]) -> ProcessGroup | None:
    """Make a group of some places of each pipeline; collective.

    Returns:
        That of this rank's pipeline; None if this rank is not in it.
    """
    layout, own = ranks.layout, None
    for pipeline in dict.fromkeys(layout.group("pipeline", rank) for rank in range(layout.world_size)):
        members = [pipeline[place] for place in places]
        group = dist.new_group(members)
        if ranks.env.rank in members:
            own = group
    return own
