"""The settings of data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from trainer_core import DataParallelArguments

from .checks import check_beside


@dataclass(frozen=True, kw_only=True)
class DDPArguments:
    """What is handed to `torch.nn.parallel.DistributedDataParallel`, under the same names."""

    broadcast_buffers: bool = True
    """Copy the buffers of rank 0 to the others before each forward pass."""
    init_sync: bool = True
    """Copy the weights of rank 0 to the others at the start; false: refuse to start where they differ."""
    bucket_cap_mb: int | None = None
    """Size in MiB of the buckets that gradients travel in; none: torch's, 25."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that the loss does not depend on."""
    gradient_as_bucket_view: bool = False
    """Let gradients be views of the buckets: saves memory as large as the gradients."""
    static_graph: bool = False
    """Promise that the same parameters are used in the same way in every step."""
    skip_all_reduce_unused_params: bool = False
    """Do not reduce gradients of parameters that no rank has used; with find_unused_parameters."""


@dataclass(frozen=True, kw_only=True)
class CompressionArguments:
    """How gradients are made smaller before they travel."""

    method: str = "no"
    """no, fp16 or bf16 (gradients are rounded), or powerSGD (matrices are sent as two thin factors, and what
    that leaves out is added to the next gradient)."""
    matrix_rank: int = 2
    """powerSGD: columns of the factors. More: nearer to the gradient, and more to send."""
    start_step: int = 100
    """powerSGD: optimizer steps with whole gradients before it begins."""
    min_compression_rate: float = 2.0
    """powerSGD: tensors that it would not make smaller by this factor travel as they are."""


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDArguments:
    """Train on each rank by itself, and average the weights every few steps.

    Lin, Stich, Patel, Jaggi: "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    enabled: bool = False
    """Whether to."""
    start_step: int | None = None
    """Optimizer steps of ordinary data-parallel training before that begins."""
    period: int | None = None
    """Optimizer steps from one averaging to the next."""
    post_local_gradient_allreduce: bool = True
    """Go on averaging gradients among the ranks of one host."""


@dataclass(frozen=True, kw_only=True)
class DiLoCoArguments:
    """Train on each rank by itself, and let an outer optimizer step on what the ranks have moved by.

    The defaults are those of Douillard et al.: "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023, arXiv 2311.08105.
    """

    enabled: bool = False
    """Whether to."""
    start_step: int = 0
    """Optimizer steps of ordinary data-parallel training before that begins."""
    inner_steps: int = 500
    """Optimizer steps from one outer step to the next."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, SGD on the mean of the differences."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum; 0: plain SGD."""


@dataclass(frozen=True, kw_only=True)
class DDPTrainingArguments(DataParallelArguments):
    """What `DDPTrainer` takes: adds the wrapper's options, compression and the low-bandwidth modes."""

    ddp: DDPArguments = field(default_factory=DDPArguments)
    """Options of torch's wrapper."""
    compression: CompressionArguments = field(default_factory=CompressionArguments)
    """How gradients are made smaller before they travel."""
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)
    """Local steps with averaged weights."""
    diloco: DiLoCoArguments = field(default_factory=DiLoCoArguments)
    """Local steps with an outer optimizer."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        check_beside(self, self)

    def for_planning(self, batch_size: int) -> Self:
        """The settings of a run that takes as much memory, where no step reads values.

        Gradients that are rounded to 16 bits for each bucket, one after the other, take next to none.
        """
        ddp = replace(
            self.ddp, find_unused_parameters=False, static_graph=False, skip_all_reduce_unused_params=False
        )
        rounded = self.compression.method in ("fp16", "bf16")
        compression = CompressionArguments() if rounded else self.compression
        plain = replace(self, ddp=ddp, compression=compression)
        return super(DDPTrainingArguments, plain).for_planning(batch_size)
