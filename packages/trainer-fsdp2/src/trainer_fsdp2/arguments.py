"""The settings of sharded training."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer_core import DataParallelArguments

from .checks import check_fsdp2


@dataclass(frozen=True, kw_only=True)
class FSDP2Arguments:
    """How the model is spread over the ranks: what `torch.distributed.fsdp.fully_shard` is told."""

    reshard_after_forward: bool | int = True
    """Drop the weights of other ranks after a layer's forward pass, and gather them again for its backward
    pass (true); keep them until then (false): faster, and needs the memory; a number: keep the part that so
    many ranks hold together, usually those of one machine."""
    replicas: int = 1
    """Copies of the sharded model (HSDP): the model is spread over world size / replicas ranks, usually those
    of one machine, and the gradients of the copies are added up."""
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
    """How the model is spread over the ranks."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        check_fsdp2(self)

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
