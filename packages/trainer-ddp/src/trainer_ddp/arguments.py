"""The settings of data-parallel training, and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol, Self

from trainer_core import ConfigurationError, DataParallelArguments, TrainingArguments

if TYPE_CHECKING:
    from trainer_core import ModelTransform

_METHODS = ("no", "fp16", "bf16", "powerSGD")
_OF_POWERSGD = ("matrix_rank", "start_step", "min_compression_rate")


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
    """Continue averaging gradients among the ranks of one host."""


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
    """Options of torch's DistributedDataParallel."""
    compression: CompressionArguments = field(default_factory=CompressionArguments)
    """With DDP: how gradients are made smaller before they travel."""
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)
    """With DDP: local steps, after which weights are averaged."""
    diloco: DiLoCoArguments = field(default_factory=DiLoCoArguments)
    """With DDP: local steps, after which an outer optimizer steps."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        self.check_replication()

    def check_replication(self) -> None:
        """Check what this class adds, alone: for a class that inherits the settings of several trainers.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        check_beside(self, self)

    def transform_for(self, axis: str, *, needed: bool) -> ModelTransform | None:
        """What replicates as these settings say."""
        says = self.ddp, self.compression, self.post_local_sgd, self.diloco
        usual = DDPArguments(), CompressionArguments(), PostLocalSGDArguments(), DiLoCoArguments()
        if axis != "replicate" or not (needed or says != usual):
            return super().transform_for(axis, needed=needed)
        from .replicate import Replicate  # which needs this module

        return Replicate()

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


class Modes(Protocol):
    """How replicas come to one model."""

    @property
    def ddp(self) -> DDPArguments:
        """Options of torch's wrapper."""

    @property
    def compression(self) -> CompressionArguments:
        """How gradients are made smaller before they travel."""

    @property
    def post_local_sgd(self) -> PostLocalSGDArguments:
        """Local steps with averaged weights."""

    @property
    def diloco(self) -> DiLoCoArguments:
        """Local steps with an outer optimizer."""


def check_beside(args: TrainingArguments, modes: Modes) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    _check_ranges(modes)
    _check_wrapper(args, modes)
    _check_modes(args, modes)
    if args.fuse_optim_with_backward:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "steps each parameter before its gradient is averaged over the ranks",
            "leave it out",
        )
    for name, condition in _unused(modes):
        group, _, field_name = name.partition(".")
        settings = getattr(modes, group)
        value = getattr(settings, field_name)
        default = next(f.default for f in fields(settings) if f.name == field_name)
        if value != default:
            raise ConfigurationError(name, value, f"has no effect {condition}", f"leave {name} out")


def check_dry_run(modes: Modes) -> None:
    """Refuse settings with which a step looks at values, which a dry run does not have.

    Raises:
        ConfigurationError: For the first of them.
    """
    from trainer_core import no_dry_run  # which imports torch

    for setting, value, usual in (
        ("compression.method", modes.compression.method, "no"),
        ("post_local_sgd.enabled", modes.post_local_sgd.enabled, False),
        ("diloco.enabled", modes.diloco.enabled, False),
        ("ddp.static_graph", modes.ddp.static_graph, False),
        ("ddp.find_unused_parameters", modes.ddp.find_unused_parameters, False),
    ):
        if value != usual:
            raise no_dry_run(setting, value)


def _check_ranges(modes: Modes) -> None:
    lowest: Mapping[str, tuple[object, float]] = {
        "ddp.bucket_cap_mb": (modes.ddp.bucket_cap_mb, 1),
        "compression.matrix_rank": (modes.compression.matrix_rank, 1),
        "compression.start_step": (modes.compression.start_step, 0),
        "compression.min_compression_rate": (modes.compression.min_compression_rate, 1),
        "post_local_sgd.start_step": (modes.post_local_sgd.start_step, 0),
        "post_local_sgd.period": (modes.post_local_sgd.period, 1),
        "diloco.start_step": (modes.diloco.start_step, 0),
        "diloco.inner_steps": (modes.diloco.inner_steps, 1),
        "diloco.outer_learning_rate": (modes.diloco.outer_learning_rate, 0),
        "diloco.outer_momentum": (modes.diloco.outer_momentum, 0),
    }
    for name, (value, low) in lowest.items():
        if value is not None and not (isinstance(value, int | float) and value >= low):
            raise ConfigurationError(name, value, f"must be at least {low}", f"set it to {low} or more")
    if not modes.diloco.outer_momentum < 1:
        raise ConfigurationError(
            "diloco.outer_momentum",
            modes.diloco.outer_momentum,
            "must be below 1",
            "choose a lower value, such as 0.9",
        )
    if modes.compression.method not in _METHODS:
        choices = ", ".join(map(repr, _METHODS))
        raise ConfigurationError(
            "compression.method", modes.compression.method, f"must be one of {choices}", "choose one of these"
        )


def _check_wrapper(args: TrainingArguments, modes: Modes) -> None:
    rewrites = [name for name in ("find_unused_parameters", "static_graph") if getattr(modes.ddp, name)]
    if rewrites and args.fused_loss != "no":
        raise ConfigurationError(
            f"ddp.{rewrites[0]}",
            True,
            f"replaces what the model returns, which fused_loss={args.fused_loss!r} needs as it is",
            "leave one of them out",
        )
    if len(rewrites) > 1:
        raise ConfigurationError(
            "ddp.find_unused_parameters",
            True,
            "looks in each step for what ddp.static_graph promises to be always the same",
            "leave one of them out",
        )


def _check_modes(args: TrainingArguments, modes: Modes) -> None:
    if modes.compression.method == "powerSGD" and args.mixed_precision == "fp16":
        raise ConfigurationError(
            "compression.method",
            "powerSGD",
            "adds what is lost of one gradient to the next, but mixed_precision='fp16' scales each step anew",
            "set mixed_precision='bf16', or choose another method",
        )
    sgd, diloco = modes.post_local_sgd, modes.diloco
    if sgd.enabled and diloco.enabled:
        raise ConfigurationError(
            "diloco.enabled",
            True,
            "cannot be combined with post_local_sgd.enabled, because each has a step of its own",
            "enable only one of them",
        )
    for name in ("start_step", "period"):
        if sgd.enabled and getattr(sgd, name) is None:
            raise ConfigurationError(
                f"post_local_sgd.{name}",
                None,
                "must be set with post_local_sgd.enabled",
                "give a number, such as 100",
            )
    mode = "post_local_sgd" if sgd.enabled else "diloco" if diloco.enabled else None
    if mode and modes.compression.method != "no":
        raise ConfigurationError(
            "compression.method",
            modes.compression.method,
            f"makes gradients smaller, but with {mode}.enabled they are not sent",
            "leave one of them out",
        )
    if mode and args.mixed_precision == "fp16":
        raise ConfigurationError(
            "mixed_precision",
            "fp16",
            f"skips steps that overflow on a rank, but with {mode}.enabled the other ranks would continue",
            "set mixed_precision='bf16'",
        )
    averaging = "ema_decay" if args.ema_decay is not None else "optim"
    if mode and (args.ema_decay is not None or args.optim == "schedule_free_adamw"):
        raise ConfigurationError(
            averaging,
            getattr(args, averaging),
            f"averages the weights of all ranks, and with {mode}.enabled each rank has weights of its own",
            "leave one of them out",
        )
    if mode and modes.ddp.static_graph:
        raise ConfigurationError(
            "ddp.static_graph",
            True,
            f"promises that gradients are reduced in every step, but with {mode}.enabled they are not",
            "leave one of them out",
        )


def _unused(modes: Modes) -> Iterator[tuple[str, str]]:
    if modes.compression.method != "powerSGD":
        for name in _OF_POWERSGD:
            yield f"compression.{name}", f"with compression.method={modes.compression.method!r}"
    for group in ("post_local_sgd", "diloco"):
        settings = getattr(modes, group)
        if not settings.enabled:
            for item in fields(settings):
                if item.name != "enabled":
                    yield f"{group}.{item.name}", f"while {group}.enabled is off"
    if not modes.ddp.find_unused_parameters:
        yield "ddp.skip_all_reduce_unused_params", "without ddp.find_unused_parameters"
