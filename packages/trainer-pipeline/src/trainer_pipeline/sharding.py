"""Let the copies of a stage share its weights instead of each holding them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_core import ConfigurationError, add_up_gradients

from .blocks import BlockStage


def shard_stages(model: nn.Module, stages: Mapping[int, nn.Module], mesh: DeviceMesh) -> None:
    """Spread each stage over the ranks that have it, block by block, in place.

    Weights that are gathered for the first microbatch stay until the last one: all of them need the weights.

    Args:
        model: The model, which has the parameters of the stages too, a tied one maybe outside of them.
        stages: The stages of this rank; their parameters may be on the meta device.
        mesh: The ranks with the same stages.

    Raises:
        ConfigurationError: If two stages of this rank have a weight in common, or one has no dimension.
    """
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    _refuse_unshardable(stages)
    ties = _places(model)
    for stage in stages.values():
        for block in stage.blocks if isinstance(stage, BlockStage) else ():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
        add_up_gradients(stage)
    for before, places in ties.items():
        found = [module._parameters[name] for module, name in places]
        after = next((parameter for parameter in found if parameter is not before), before)
        for module, name in places:
            module._parameters[name] = after


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, name))
    return places


def _refuse_unshardable(stages: Mapping[int, nn.Module]) -> None:
    seen: dict[int, int] = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if parameter.ndim == 0:
                raise ConfigurationError(
                    "pipeline.shard_replicas",
                    True,
                    f"{name} of stage {number} is a single number, which cannot be spread over ranks",
                    "give it one dimension, of size 1",
                )
            other = seen.setdefault(id(parameter), number)
            if other != number:
                raise ConfigurationError(
                    "pipeline.shard_replicas",
                    True,
                    f"stages {other} and {number} of one rank have a weight in common ({name} of the "
                    "latter), and each stage gathers and drops its weights by itself",
                    "choose a schedule that has first and last stage on different ranks, such as 1f1b",
                )
