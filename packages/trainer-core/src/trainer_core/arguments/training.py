"""Adds memory, model construction and bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

from .base import BaseTrainingArguments
from .checks_training import check_training


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """What `Trainer` takes: adds memory, model construction and bookkeeping."""

    construct_model_on: str = "default"
    """Where the model is built: default (host, then moved), device, or meta (needs model_init; filled from
    a checkpoint without weights in between)."""
    transformer_layers_path: str | None = None
    """Dotted path of the container of the model's blocks; none: it is looked for."""
    activation_checkpointing: str = "no"
    """Blocks that are recomputed in the backward pass: no, full, every_n, share or operators."""
    activation_checkpointing_every: int | None = None
    """For every_n: recompute every n-th block."""
    activation_checkpointing_share: float | None = None
    """For share: the share of the blocks that is recomputed, evenly spaced."""
    activation_checkpointing_operators: tuple[str, ...] | None = None
    """For operators: those whose results are kept, such as aten.mm; none: matrix products and attention."""
    activation_memory_budget: float | None = None
    """Share of the activations that the compiler may keep, 0 to 1; needs torch_compile."""
    torch_compile_scope: str = "model"
    """What torch_compile compiles: the model as a whole, or its blocks one by one."""
    fuse_optim_with_backward: bool = False
    """Step each parameter as soon as its gradient is there, and free the gradient."""

    gc_threshold: float = 0.5
    """Share of the reserved device memory above which cached blocks are given back, 0 to 1."""
    gc_steps: int | None = None
    """Collect Python's garbage every so many optimizer steps, and not in between; none: as Python does."""
    gc_freeze: bool = False
    """Leave what exists when training begins out of garbage collection."""

    max_train_seconds: float | None = None
    """Save and stop this long after train() began, before a scheduler's deadline; exit code 75."""
    seed_per_rank: bool = False
    """Add the rank to the seed once the model is built, so that ranks draw different dropout masks."""
    set_dataset_epoch: bool = True
    """Tell the training data which epoch comes, where it asks."""
    debug_optimizer_groups: bool = False
    """Print which parameter is in which optimizer group."""
    speed_metrics_start_step: int = 1
    """Optimizer step after which the speed of the whole run is timed, so that start-up does not count."""
    peak_hardware_flops: float | None = None
    """Peak FLOP/s of one device, for MFU; none: the user's hardware.yaml, then the table by device name."""
    check_flops: bool = True
    """Count one step on a copy of the model without values, at the first log entry: warns if the FLOPs of MFU
    are wrong, and tells what is recomputed, for HFU."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        check_training(self)

    @property
    def recomputation(self) -> str:
        """The mode of activation checkpointing, by whichever name it was asked for."""
        return "full" if self.gradient_checkpointing else self.activation_checkpointing

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        return self.recomputation != "no" or self.torch_compile_scope != "model"
