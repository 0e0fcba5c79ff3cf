"""Adds memory, model construction, bookkeeping and how ranks share data; with the rules of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from dist_env import DistributedEnvironmentError, ParallelLayout, get_logger
from perf_metrics import MEASURED

from ..errors import ConfigurationError, Dependent, refuse_without_effect, unused_settings
from . import rules
from .base import BaseTrainingArguments

if TYPE_CHECKING:
    from ..distributed.transforms import ModelTransform

logger = get_logger(__name__)

Uneven = Literal["pad", "stop", "error"]
UNEVEN: tuple[Uneven, ...] = ("pad", "stop", "error")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """What `Trainer` takes: adds memory, model construction and bookkeeping."""

    construct_model_on: str = "default"
    """Where the model is built: default (host, then moved), device, or meta (needs model_init; filled from
    a checkpoint without weights in between)."""
    transformer_layers_path: str | None = None
    """Dotted path of the container of the model's blocks; none: it is looked for."""
    activation_checkpointing: str = "no"
    """Blocks that are recomputed in the backward pass: no, full, every_n, share, operators, or custom for
    those that `Trainer(activation_checkpointing_fn=...)` names."""
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
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999: evaluations, samples,
    checkpoints and exports have the average; none: keep none."""

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
    peak_hardware_flops: float | str | None = None
    """Peak FLOP/s of one device, for MFU, or measured: the best of some matrix products. None: the user's
    hardware.yaml, then the table by device name."""
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

    def for_planning(self, batch_size: int) -> Self:
        """The settings of a run that takes as much memory, without an accelerator and its kernels.

        Args:
            batch_size: Examples of one rank at a time.
        """
        args = self
        if self.fp8_recipe is not None:
            args = replace(self, fp8_recipe=None, fp8_dim_alignment=16, fp8_exclude=(), fp8_emulate=False)
        return replace(
            args,
            use_cpu=True,
            device=None,
            mixed_precision="bf16" if self.mixed_precision == "fp16" else self.mixed_precision,
            fused_loss="chunked" if self.fused_loss in ("liger", "cut") else self.fused_loss,
            enable_activation_offloading=False,
            gc_threshold=0.5,
            per_device_train_batch_size=batch_size,
            max_steps=max(self.max_steps, 1),
        )

    @property
    def recomputation(self) -> str:
        """The mode of activation checkpointing, by whichever name it was asked for."""
        return "full" if self.gradient_checkpointing else self.activation_checkpointing

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        return self.recomputation != "no" or self.torch_compile_scope != "model"


@dataclass(frozen=True, kw_only=True)
class DataParallelArguments(TrainingArguments):
    """What every trainer with several data-parallel ranks takes: who reads which data."""

    mesh: str | None = None
    """Ranks in each dimension, such as "dp=2,shard=4" or "pp=2,shard=8": dp replicates the weights, shard
    divides them, pp divides the layers into stages; one size may be auto. None: all ranks in the dimension of
    the trainer."""
    dispatch_batches: bool = True
    """Rank 0 reads and hands each rank other batches; false: every rank reads data of its own."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation data; none: as dispatch_batches."""
    uneven_batches: str = "pad"
    """When some ranks run out of training data before others: pad (with batches that do not count), stop
    (leave out what the others have left) or error."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        rules.one_of("uneven_batches", self.uneven_batches, UNEVEN)
        if self.mesh:
            try:
                ParallelLayout.parse(self.mesh.replace("auto", "1"))
            except DistributedEnvironmentError as error:
                raise ConfigurationError(
                    "mesh", self.mesh, f"cannot be used: {error}", "change the mesh"
                ) from error

    def layout(self, world_size: int) -> ParallelLayout | None:
        """The sizes of all dimensions; None if the trainer's own dimension has all ranks.

        Args:
            world_size: Number of ranks of the job.

        Raises:
            dist_env.DistributedEnvironmentError: If `mesh` does not fit them.
        """
        return ParallelLayout.parse(self.mesh, world_size) if self.mesh else None

    def transform_for(self, axis: str, *, needed: bool) -> ModelTransform | None:
        """What heeds settings of these arguments for a dimension, where the trainer was given nothing for it.

        Args:
            axis: Name of the dimension, as `ModelTransform.axis`.
            needed: Whether something has to be done for it. Otherwise settings that are not the defaults are
                heeded, and what heeds them refuses those without effect.

        Returns:
            The transform; None if the arguments say nothing of that dimension.
        """
        return None

    @property
    def dispatches_evaluation(self) -> bool:
        """Whether rank 0 reads the evaluation data for all."""
        return self.dispatch_batches if self.dispatch_eval_batches is None else self.dispatch_eval_batches


_CHOICES = {
    "construct_model_on": ("default", "meta", "device"),
    "activation_checkpointing": ("no", "full", "every_n", "share", "operators", "custom"),
    "torch_compile_scope": ("model", "blocks"),
}
_DETAILS = {"every": "every_n", "share": "share", "operators": "operators"}
"""Setting `activation_checkpointing_<key>` belongs to the mode `<value>`."""


def check_training(args: TrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    for name, choices in _CHOICES.items():
        rules.one_of(name, getattr(args, name), choices)
    rules.within("gc_threshold", args.gc_threshold, 0.0, 1.0)
    rules.at_least("speed_metrics_start_step", args.speed_metrics_start_step, 0)
    if args.gc_steps is not None:
        rules.at_least("gc_steps", args.gc_steps, 1)
    if isinstance(args.peak_hardware_flops, str):
        rules.one_of("peak_hardware_flops", args.peak_hardware_flops, (MEASURED,))
        if args.fp8_recipe is not None:
            raise ConfigurationError(
                "peak_hardware_flops",
                MEASURED,
                "cannot be: products in float8 are not measured",
                "leave it out, or give the peak in FLOP/s",
            )
    else:
        _check_positive(args, "peak_hardware_flops")
    _check_positive(args, "max_train_seconds")
    _check_checkpointing(args)
    _check_memory_budget(args)
    if args.ema_decay is not None:
        _check_average(args, args.ema_decay)
    if args.fuse_optim_with_backward:
        _check_fused_optimizer(args)
    refuse_without_effect(args, _unused(args))


def _check_positive(args: TrainingArguments, name: str) -> None:
    value = getattr(args, name)
    if value is not None and (not rules.is_number(value) or not value > 0):
        raise ConfigurationError(
            name, value, "must be a number above 0", "set it to a positive number, or leave it out"
        )


def _check_checkpointing(args: TrainingArguments) -> None:
    if args.gradient_checkpointing and args.activation_checkpointing not in ("no", "full"):
        raise ConfigurationError(
            "gradient_checkpointing",
            True,
            "means activation_checkpointing='full', but "
            f"activation_checkpointing={args.activation_checkpointing!r} is set",
            "leave gradient_checkpointing out",
        )
    mode = args.recomputation
    if mode == "every_n":
        rules.at_least("activation_checkpointing_every", args.activation_checkpointing_every, 1)
    if mode == "share":
        rules.within("activation_checkpointing_share", args.activation_checkpointing_share, 0.0, 1.0)


def _check_memory_budget(args: TrainingArguments) -> None:
    budget = args.activation_memory_budget
    if budget is None:
        return
    rules.within("activation_memory_budget", budget, 0.0, 1.0)
    if not args.torch_compile:
        raise ConfigurationError(
            "activation_memory_budget", budget, "is used only by the compiler", "set torch_compile=True"
        )
    if args.recomputation != "no":
        raise ConfigurationError(
            "activation_memory_budget",
            budget,
            "lets the compiler choose what to recompute, but activation_checkpointing has chosen already",
            "leave one of them out",
        )


def _check_average(args: TrainingArguments, decay: float) -> None:
    rules.within("ema_decay", decay, 0.0, 1.0)
    if decay in (0, 1):
        raise ConfigurationError(
            "ema_decay", decay, "must lie between 0 and 1, without the ends", "use 0.999, or leave it out"
        )
    if args.optim == "schedule_free_adamw":
        raise ConfigurationError(
            "ema_decay",
            decay,
            f"excludes optim={args.optim!r}, which has an average",
            "leave one of them out",
        )


def _check_fused_optimizer(args: TrainingArguments) -> None:
    setting, fix = "fuse_optim_with_backward", "leave one of them out"
    if args.optim != "adamw":
        rule = f"excludes optim={args.optim!r}, which does not step one parameter at a time"
        raise ConfigurationError(setting, True, rule, fix)
    if args.max_grad_norm:
        rule = f"cannot be combined with max_grad_norm={args.max_grad_norm}"
        why = "the norm is known only after the last step"
        raise ConfigurationError(setting, True, f"{rule}, because {why}", fix)
    if args.gradient_accumulation_steps > 1:
        rule = f"cannot be combined with gradient_accumulation_steps={args.gradient_accumulation_steps}"
        why = "each backward pass would be an optimizer step"
        raise ConfigurationError(setting, True, f"{rule}, because {why}", fix)
    if args.mixed_precision == "fp16":
        why = "the gradients are still scaled when they appear"
        rule = f"cannot be combined with mixed_precision='fp16', because {why}"
        raise ConfigurationError(setting, True, rule, f"set mixed_precision='bf16', or {fix}")
    if args.nonfinite_policy == "skip":
        why = "weights have moved before the norm is known"
        rule = f"cannot be combined with nonfinite_policy='skip', because {why}"
        raise ConfigurationError(setting, True, rule, "set nonfinite_policy='stop' or 'raise'")


def _unused(args: TrainingArguments) -> Iterator[Dependent]:
    for key, mode in _DETAILS.items():
        if args.recomputation != mode:
            yield Dependent(
                f"activation_checkpointing_{key}",
                f"with activation_checkpointing={args.recomputation!r}",
                f"set activation_checkpointing={mode!r}",
            )
    if args.seed < 0:
        yield Dependent("seed_per_rank", "without a seed", "set a seed")
    if not args.torch_compile:
        yield Dependent("torch_compile_scope", "while torch_compile is off", "set torch_compile=True")
    if not args.uses_blocks:
        yield Dependent(
            "transformer_layers_path",
            "without activation_checkpointing or torch_compile_scope='blocks'",
            "set one of them",
        )


def warn_unused_settings(args: TrainingArguments, device_type: str, *, evaluates: bool) -> None:
    """Warn of settings other than their defaults that nothing will read in this run.

    Args:
        args: The arguments.
        device_type: Where the run computes.
        evaluates: Whether there is evaluation data.
    """
    for line in unused_settings(args, _without_effect(args, device_type, evaluates)):
        logger.warning("%s", line)


def _without_effect(args: TrainingArguments, device_type: str, evaluates: bool) -> Iterator[Dependent]:
    if args.eval_strategy != "steps":
        condition = f"with eval_strategy={args.eval_strategy!r}"
        yield Dependent("eval_steps", condition, "set eval_strategy='steps'")
    if args.eval_strategy == "no":
        yield Dependent("eval_delay", "with eval_strategy='no'", "set eval_strategy='steps'")
    if not evaluates:
        for name in ("max_eval_steps", "per_device_eval_batch_size", "eval_on_save"):
            yield Dependent(name, "without an eval_dataset", "give the trainer an eval_dataset")
    if args.logging_strategy != "steps":
        condition = f"with logging_strategy={args.logging_strategy!r}"
        yield Dependent("logging_steps", condition, "set logging_strategy='steps'")
    if args.save_strategy != "steps":
        condition = f"with save_strategy={args.save_strategy!r}"
        yield Dependent("save_steps", condition, "set save_strategy='steps'")
    if args.save_strategy == "no":
        for name in ("save_total_limit", "save_on_each_node", "remote_dir"):
            yield Dependent(name, "with save_strategy='no'", "set save_strategy='steps'")
    if args.remote_dir is None:
        yield Dependent("remote_save_total_limit", "without remote_dir", "set remote_dir='s3://bucket/run'")
    if 0 <= args.max_steps < args.speed_metrics_start_step:
        condition = f"in a run of max_steps={args.max_steps}"
        yield Dependent("speed_metrics_start_step", condition, "lower it")
    if device_type == "cpu":
        yield Dependent("gc_threshold", "on the CPU", "train on a GPU")
