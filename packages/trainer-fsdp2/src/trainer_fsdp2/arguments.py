"""The settings of sharded training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from dist_env import ParallelLayout, get_logger
from trainer_core import ConfigurationError, DataParallelArguments, TrainingArguments

if TYPE_CHECKING:
    from trainer_core import ModelTransform

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FSDP2Arguments:
    """How the model is spread over the ranks: what `torch.distributed.fsdp.fully_shard` is told."""

    reshard_after_forward: bool | int = True
    """Drop the weights of other ranks after a layer's forward pass, and gather them again for its backward
    pass (true); keep them until then (false): faster, and needs the memory; a number: keep the part that so
    many ranks hold together, usually those of one machine."""
    replicas: int = 1
    """Deprecated: mesh="dp=2,shard=8" replicates a model twice (HSDP) that is sharded over 8 ranks each."""
    param_dtype: str | None = None
    """What layers compute in: float32, bfloat16 or float16. The weights that the optimizer steps keep their
    own dtype. None: their own, or that of mixed_precision."""
    reduce_dtype: str | None = None
    """What gradients travel in; none: float32 if param_dtype is set, otherwise the dtype of the gradients."""
    cpu_offload: bool = False
    """Weights, gradients and the optimizer rest in the memory of the host."""
    shard_transformer_layers: bool = True
    """Shard each transformer layer by itself, so that only a few are whole at a time; false: only the model
    as one piece."""
    layer_classes: tuple[str, ...] | None = None
    """Names of module classes to shard by themselves, instead of the blocks of transformer_layers_path."""
    prefetch_depth: int | None = None
    """Layers whose weights are gathered ahead of the one that computes; none: torch's own order, one."""
    reduce_each_microbatch: bool = False
    """Add gradients up over the ranks with every microbatch; false: with the last one of a step, which sends
    less, and until then each rank holds whole gradients of the model."""
    fp8_all_gather: bool = False
    """With fp8_recipe="tensorwise": gather the weights of FP8 layers in float8, half of bfloat16's bytes."""


@dataclass(frozen=True, kw_only=True)
class FSDP2TrainingArguments(DataParallelArguments):
    """What `FSDP2Trainer` takes: adds how the model is sharded."""

    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)
    """With FSDP2, also in a pipeline: how the model is spread over the ranks."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        self.check_sharding()

    def check_sharding(self) -> None:
        """Check what this class adds, alone: for a class that inherits the settings of several trainers.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        check_beside(self, self.fsdp2)
        if self.mesh and self.fsdp2.replicas != 1:
            raise ConfigurationError(
                "fsdp2.replicas",
                self.fsdp2.replicas,
                "cannot be given together with mesh, which has the dimension dp for it",
                "leave out fsdp2.replicas",
            )

    def layout(self, world_size: int) -> ParallelLayout | None:
        """The sizes of all dimensions; None if all ranks share one copy of the model.

        Args:
            world_size: Number of ranks of the job.

        Raises:
            ConfigurationError: If fsdp2.replicas does not fit them.
            dist_env.DistributedEnvironmentError: If `mesh` does not fit them.
        """
        replicas = self.fsdp2.replicas
        if replicas == 1:
            return super().layout(world_size)
        if world_size % replicas:
            raise ConfigurationError(
                "fsdp2.replicas",
                replicas,
                f"must divide the world size, {world_size}",
                "choose a divisor, because world size / replicas ranks share each copy of the model",
            )
        if replicas == world_size > 1:
            raise ConfigurationError(
                "fsdp2.replicas",
                replicas,
                f"leaves nothing to shard on {world_size} ranks",
                "use trainer-ddp, or fewer replicas",
            )
        layout = ParallelLayout(replicate=replicas, shard=world_size // replicas)
        logger.warning("fsdp2.replicas is deprecated: set mesh=%r", str(layout))
        return layout

    def for_planning(self, batch_size: int) -> Self:
        """The settings of a run that takes as much memory, without an accelerator; of FP8 it takes bf16's."""
        plain = replace(self, fsdp2=replace(self.fsdp2, fp8_all_gather=False))
        return super(FSDP2TrainingArguments, plain).for_planning(batch_size)

    def transform_for(self, axis: str, *, needed: bool) -> ModelTransform | None:
        """What shards as `fsdp2` says."""
        if axis != "shard" or not (needed or self.fsdp2 != FSDP2Arguments()):
            return super().transform_for(axis, needed=needed)
        from .full_sharding import FullyShard  # which needs this module

        return FullyShard.from_args(self)

    @property
    def matmul_dtype(self) -> str:
        """Name of the dtype in which matrix products run, as the peak tables name it."""
        if self.autocast_dtype is None and self.fsdp2.param_dtype == "bfloat16":
            return "bf16"
        return super().matmul_dtype

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether ranks hold gradients of the whole model between the microbatches of a step."""
        return self.gradient_accumulation_steps > 1 and not self.fsdp2.reduce_each_microbatch

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        by_path = self.fsdp2.shard_transformer_layers and self.fsdp2.layer_classes is None
        return by_path or super().uses_blocks


_DTYPES = ("float32", "bfloat16", "float16")
"""The last one is refused by another rule, which says why."""


def _check_values(fsdp2: FSDP2Arguments) -> None:
    _check_types(fsdp2)
    for name in ("param_dtype", "reduce_dtype"):
        value = getattr(fsdp2, name)
        if value not in (None, *_DTYPES):
            raise ConfigurationError(
                f"fsdp2.{name}", value, "must be 'float32' or 'bfloat16'", "choose one of these"
            )
    if fsdp2.replicas < 1:
        raise ConfigurationError(
            "fsdp2.replicas", fsdp2.replicas, "must be at least 1", "set it to 1 or more"
        )
    if fsdp2.prefetch_depth is not None and fsdp2.prefetch_depth < 1:
        raise ConfigurationError(
            "fsdp2.prefetch_depth",
            fsdp2.prefetch_depth,
            "must be at least 1",
            "set it to 1 or more, or leave it out",
        )
    reshard = fsdp2.reshard_after_forward
    if not isinstance(reshard, bool) and reshard < 2:
        raise ConfigurationError(
            "fsdp2.reshard_after_forward",
            reshard,
            "must be True, False or a number of ranks of at least 2",
            "set it to True, for example",
        )
    if fsdp2.layer_classes is not None and not fsdp2.layer_classes:
        raise ConfigurationError(
            "fsdp2.layer_classes", (), "names no class", "name one, such as ('Block',), or leave it out"
        )


def _check_types(fsdp2: FSDP2Arguments) -> None:
    """Refuse values of other types, which a call from Python may give."""
    if not isinstance(fsdp2.replicas, int) or isinstance(fsdp2.replicas, bool):
        raise ConfigurationError(
            "fsdp2.replicas", fsdp2.replicas, "must be a whole number", "give one, such as 2"
        )
    if not isinstance(fsdp2.reshard_after_forward, int):
        raise ConfigurationError(
            "fsdp2.reshard_after_forward",
            fsdp2.reshard_after_forward,
            "must be True, False or a number of ranks",
            "set it to True, for example",
        )
    if fsdp2.layer_classes is not None and not isinstance(fsdp2.layer_classes, tuple):
        raise ConfigurationError(
            "fsdp2.layer_classes",
            fsdp2.layer_classes,
            "must be a tuple of names",
            "write it as ('Block',), for example",
        )


def check_beside(args: TrainingArguments, fsdp2: FSDP2Arguments) -> None:
    """Check the settings of sharding, and those that do not go with it.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    _check_values(fsdp2)
    if args.fuse_optim_with_backward:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "steps each parameter before its gradient is summed over the ranks",
            "leave it out",
        )
    for setting, value in (
        ("default_dtype", args.default_dtype),
        ("fsdp2.param_dtype", fsdp2.param_dtype),
        ("fsdp2.reduce_dtype", fsdp2.reduce_dtype),
    ):
        if value == "float16":
            raise ConfigurationError(
                setting,
                value,
                "exceeds the range of float16 with gradients that no loss scale protects",
                "use mixed_precision='fp16', which scales the loss, or bfloat16",
            )
    if fsdp2.fp8_all_gather and args.fp8_recipe != "tensorwise":
        raise ConfigurationError(
            "fsdp2.fp8_all_gather",
            True,
            f"needs fp8_recipe='tensorwise', whose scales fit any shard, but it is {args.fp8_recipe!r}",
            "set fp8_recipe='tensorwise', or leave it out",
        )
    if (
        args.torch_compile_full_graph
        and args.torch_compile_scope == "model"
        and fsdp2.shard_transformer_layers
    ):
        raise ConfigurationError(
            "torch_compile_full_graph",
            True,
            "cannot be used with torch_compile_scope='model' where layers are sharded by themselves, "
            "because their weights are gathered between compiled pieces",
            "set torch_compile_scope='blocks', or leave torch_compile_full_graph out",
        )
    if fsdp2.reduce_each_microbatch and args.gradient_accumulation_steps == 1:
        raise ConfigurationError(
            "fsdp2.reduce_each_microbatch",
            True,
            "has no effect with gradient_accumulation_steps=1",
            "leave it out",
        )
    if not fsdp2.shard_transformer_layers:
        for name in ("layer_classes", "prefetch_depth"):
            value = getattr(fsdp2, name)
            if value is not None:
                raise ConfigurationError(
                    f"fsdp2.{name}",
                    value,
                    "has no effect without fsdp2.shard_transformer_layers",
                    "leave one of them out",
                )
