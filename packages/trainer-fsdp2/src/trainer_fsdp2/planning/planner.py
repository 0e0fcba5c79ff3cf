"""Puts the parts of a plan together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer_core import ModelInit, PlannedBatch, margin_of

from ..arguments import FSDP2TrainingArguments
from .activations import Activations, estimate_activations
from .memory_plan import MemoryPlan
from .mesh import Mesh, mesh_of
from .outline import outline
from .state import OptimizerFactory, ShardedState, sharded_state
from .transient import is_sharded, transient


def plan(
    model_init: ModelInit,
    args: FSDP2TrainingArguments,
    *,
    world_size: int | Mesh,
    sequence_length: int | None = None,
    batch: Mapping[str, Tensor] | None = None,
    optimizer_factory: OptimizerFactory | None = None,
) -> MemoryPlan:
    """Say what a run will need of memory, before anything of it is allocated.

    Parameters, gradients and optimizer state are exact: a parameter is cut along its first dimension as
    `torch.chunk` does, tied ones count once, frozen ones have neither gradient nor state. Activations are an
    estimate: one microbatch, forward and backward, on tensors without values, without torch.compile and in
    bf16 where the run uses FP8. The model is built on the meta device; no weight is drawn or loaded.

    Args:
        model_init: Builds the model, as the trainer is given it.
        args: The settings of the run.
        world_size: Number of ranks; or a mesh, which may also give each a whole copy, as trainer-ddp does.
        sequence_length: Tokens of one example of `input_ids` and `labels`.
        batch: What a rank gets at a time, for models that take something else; only shapes and dtypes count.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.

    Returns:
        The plan of the fullest rank.

    Raises:
        ConfigurationError: If the settings do not fit the ranks or the model, neither batch nor sequence
            length is given, or model or optimizer cannot do without values.

    Example:
        >>> print(plan(model_init, args, world_size=8, sequence_length=4096))  # doctest: +SKIP
    """
    planner = Planner(
        model_init, sequence_length=sequence_length, batch=batch, optimizer_factory=optimizer_factory
    )
    mesh = world_size if isinstance(world_size, Mesh) else mesh_of(args, world_size)
    return planner.plan(args, mesh)


class Planner:
    """Plans of one model for several settings; what they have in common is computed once.

    Args:
        model_init: Builds the model.
        sequence_length: Tokens of one example.
        batch: What a rank gets at a time, instead.
        optimizer_factory: As the trainer is given it.

    Raises:
        ConfigurationError: If neither batch nor sequence length is given, or both are, or they make no sense.
    """

    def __init__(
        self,
        model_init: ModelInit,
        *,
        sequence_length: int | None = None,
        batch: Mapping[str, Tensor] | None = None,
        optimizer_factory: OptimizerFactory | None = None,
    ) -> None:
        self._batch = PlannedBatch(sequence_length, batch)
        self._model_init = model_init
        self._optimizer_factory = optimizer_factory
        self._model: nn.Module | None = None
        self._states: dict[tuple[int, int | None], ShardedState] = {}
        self._activations: dict[tuple[object, ...], Activations] = {}

    def plan(self, args: FSDP2TrainingArguments, mesh: Mesh, *, ranks: int | None = None) -> MemoryPlan:
        """Plan one layout.

        Args:
            args: Settings; those of optimizer, loss and model must be the same at every call.
            mesh: The ranks.
            ranks: How many of one copy go into `per_rank`; all by default.
        """
        model = self._weights(args)
        size = sum(parameter.numel() for parameter in model.parameters())
        travels = transient(model, args, mesh)
        state = self._state(args, mesh.shards, ranks)
        batch = self._batch.of(args.per_device_train_batch_size, torch.device("meta"))
        found = self._activations_of(args, mesh, batch)
        fullest = max(state.ranks, key=lambda rank: rank.total)
        offloaded = found.saved if args.enable_activation_offloading else 0
        host = args.fsdp2.cpu_offload
        return MemoryPlan(
            mesh=mesh,
            parameter_count=size,
            batch_size=len(batch["labels"]),
            sequence_length=batch["labels"].shape[-1],
            parameters=fullest.parameters,
            gradients=fullest.gradients,
            optimizer=fullest.optimizer,
            optimizer_name=state.optimizer_name,
            gathered=travels.gathered,
            reduced=travels.reduced,
            accumulated=travels.accumulated,
            saved_activations=found.saved,
            activations=found.peak - offloaded,
            on_host=offloaded + (fullest.total if host else 0),
            state_on_host=host,
            per_rank=tuple(rank.total for rank in state.ranks),
            notes=_notes(args, mesh),
        )

    def least(self, args: FSDP2TrainingArguments, mesh: Mesh) -> int:
        """Bytes of the device that a layout needs before any activation; takes no time."""
        state = self._state(args, mesh.shards, 1).ranks[0].total
        size = sum(transient(self._weights(args), args, mesh)) + (0 if args.fsdp2.cpu_offload else state)
        return size + margin_of(size)

    def _weights(self, args: FSDP2TrainingArguments) -> nn.Module:
        """The model as one outline of it says, whatever it recomputes: that changes no weight."""
        if self._model is None:
            self._model = outline(self._model_init, args)
        return self._model

    def _state(self, args: FSDP2TrainingArguments, shards: int, ranks: int | None) -> ShardedState:
        key = (shards, ranks)
        if key not in self._states:
            self._states[key] = sharded_state(
                self._weights(args), args, shards, self._optimizer_factory, ranks=ranks
            )
        return self._states[key]

    def _activations_of(
        self, args: FSDP2TrainingArguments, mesh: Mesh, batch: Mapping[str, Tensor]
    ) -> Activations:
        key = (
            is_sharded(args, mesh),
            args.fsdp2.param_dtype,
            args.mixed_precision,
            args.recomputation,
            args.activation_checkpointing_every,
            args.activation_checkpointing_share,
            args.activation_checkpointing_operators,
            tuple((name, tuple(value.shape)) for name, value in batch.items()),
        )
        if key not in self._activations:
            # A model of its own: it is used up.
            self._activations[key] = estimate_activations(outline(self._model_init, args), args, mesh, batch)
        return self._activations[key]


def _notes(args: FSDP2TrainingArguments, mesh: Mesh) -> tuple[str, ...]:
    sharded = is_sharded(args, mesh)
    casts = sharded and args.autocast_dtype is not None
    told = {
        "mixed_precision keeps a cast of every weight from forward to backward, with the activations; "
        "fsdp2.param_dtype='bfloat16' computes in bf16 without them": casts,
        "gradient_accumulation_steps above 1 keeps whole gradients on every rank until the last microbatch; "
        "fsdp2.reduce_each_microbatch adds them up at once": (sharded and args.keeps_whole_gradients),
        "every GPU holds the whole model, as with trainer-ddp; gradients under way are its buckets, and "
        "ddp.gradient_as_bucket_view does without": not sharded and mesh.replicas > 1,
        "layers of fp8_recipe are counted as in bf16": args.fp8_recipe is not None,
        "torch_compile usually keeps fewer activations than this": args.torch_compile,
    }
    return tuple(note for note, applies in told.items() if applies)
