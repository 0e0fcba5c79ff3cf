"""Tensor parallelism as a transform: each rank of the dimension `tensor` computes a part of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dist_env import ParallelLayout
from model_parallel import PlanError

from ..arguments import TrainingArguments
from ..errors import ConfigurationError
from .ranks import Ranks
from .transforms import BuiltModel, ModelTransform, StepHooks, refuse_converted_layers


class TensorParallel(ModelTransform):
    """Divides matrices and attention heads over the ranks of the dimension `tensor`.

    These ranks get the same batches. It combines with what shards or replicates the divided model:
    `Trainer(args, parallel=[TensorParallel(), FullyShard()])` with `mesh="shard=2,tp=2"`.

    Args:
        plan: Styles by names of modules, as in `model_parallel`; None: the model's own.
        sequence: Whether activations between the layers are divided by the sequence. The length of each row
            must then be a multiple of the ranks.
    """

    axis: ClassVar[str] = "tensor"

    def __init__(self, plan: Mapping[str, str] | None = None, *, sequence: bool = False) -> None:
        self._plan = plan
        self._sequence = sequence

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Self:
        """The transform of a layout that nothing else is said about: with the model's own plan."""
        return cls()

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse settings that go with whole layers only, and dimensions it does not combine with yet.

        Raises:
            ConfigurationError: Naming the setting.
        """
        if not self.is_active(ranks.layout):
            return
        refuse_converted_layers(args, ranks.layout, "tensor parallelism", "tp")
        if args.fused_loss not in ("no", "auto", "chunked"):
            raise ConfigurationError(
                "fused_loss",
                args.fused_loss,
                f"needs an output head that is whole, which the layout {ranks.layout} divides",
                "set fused_loss='chunked'",
            )

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What stays whole on each rank."""
        if self._sequence:
            return ()
        return ("activations between divided layers are whole on each rank of tp",)

    def apply(self, built: BuiltModel) -> None:
        """Divide the model in place; parameters become DTensors of the same names.

        Raises:
            ConfigurationError: If the model cannot be divided by the plan among so many ranks.
        """
        meshes = built.ranks.meshes
        if meshes is None:
            raise ConfigurationError(
                "world_size",
                built.ranks.env.world_size,
                "has no process group to divide layers over",
                "open a dist_env.DistributedEnvironment first and pass it as distributed_env",
            )
        from model_parallel import shard_tensors  # loads DTensor, which takes a second

        try:
            shard_tensors(
                built.model,
                meshes.tensor,
                self._plan,
                sequence=self._sequence,
                stages=built.ranks.layout.pipeline > 1,
            )
        except PlanError as error:
            raise ConfigurationError(
                "mesh", str(built.ranks.layout), f"cannot divide this model: {error}", "change tp or the plan"
            ) from error
        built.layers_divide_sequences = self._sequence
        built.hooks.append(TensorHooks(built.model, meshes.tensor))


class TensorHooks(StepHooks):
    """What divided layers add to a run: equal draws on accelerators, and texts of sequences that are whole.

    Args:
        model: The divided model.
        mesh: The ranks that divide it.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh

    def begin(self, step: int) -> None:
        """Give these ranks one state of the accelerator's generator, also where a checkpoint of fewer ranks
        has none for some of them. `Ranks.equal_draws` does so on the host, in each step."""
        kind = self._mesh.device_type
        if kind != "cpu":
            device = torch.get_device_module(kind)
            state = device.get_rng_state().to(kind)
            dist.broadcast(state, group=self._mesh.get_group(), group_src=0)
            device.set_rng_state(state.cpu())

    def generating(self) -> AbstractContextManager[None]:
        """A context in which sequences are whole: the next token is one position, which no rank shares."""
        from model_parallel import whole_sequences

        return whole_sequences(self._model)
