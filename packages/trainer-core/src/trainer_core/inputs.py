"""What the user gave to the trainer beside the arguments: checked, and brought into one form."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from checkpoint_core import Preprocessor, StateComponent
from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    ParallelLayout,
    StaticDistributedEnvironment,
    get_logger,
    unused_launcher,
)

from .arguments import TrainingArguments
from .data.loaders import Collator, EvalData, EvalMetric, TrainData, names_of_sets, result_names
from .distributed.transforms import ModelTransform
from .errors import ConfigurationError
from .loss import FusedLossFactory, TokenLoss, check_loss, check_takes_targets
from .model import ModelInit, ModelSource, RecomputeFn, check_recompute_fn
from .optimization import (
    NamedParameters,
    OptimizerFactory,
    OptimizerGroups,
    SchedulerFactory,
    schedule_free_class,
)
from .state import callback_name

logger = get_logger(__name__)

_OF_OPTIMIZER = (
    "optim",
    "optim_kwargs",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
_OF_SCHEDULE = ("warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs")

RUN_COMPONENTS = (
    "trainer",
    "model",
    "training_weights",
    "optimizer",
    "scheduler",
    "grad_scaler",
    "callbacks",
    "dataset",
    "rng",
    "replica",
    "outer",
    "compression",
)
"""Keys of what runs save by themselves, with any transform of these packages."""

OptimizerClass = tuple[type[Optimizer], Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """Everything that a run is made of beside the arguments and the devices."""

    model: ModelSource
    initial_weights: Path | None
    train_data: TrainData | None
    eval_data: EvalData | None
    collator: Collator | None
    loss: TokenLoss | None
    fused_loss: FusedLossFactory | None
    eval_metrics: Mapping[str, EvalMetric]
    optimizer: OptimizerFactory | None
    optimizer_groups: OptimizerGroups | None
    scheduler: SchedulerFactory | None
    preprocessor: Preprocessor | None
    recompute_fn: RecomputeFn | None
    state_components: Sequence[StateComponent]

    def facts(self) -> dict[str, object]:
        """What of it has to be the same on all ranks, as plain values by the names that users know."""
        given = {
            "train_dataset": self.train_data,
            "eval_dataset": self.eval_data,
            "compute_loss_func": self.loss,
            "fused_loss_factory": self.fused_loss,
            "activation_checkpointing_fn": self.recompute_fn,
            "optimizer_factory": self.optimizer,
            "optimizer_groups": self.optimizer_groups,
            "lr_scheduler_factory": self.scheduler,
        }
        facts: dict[str, object] = {
            name: "given" if part is not None else "not given" for name, part in given.items()
        }
        if isinstance(self.eval_data, Mapping):
            facts["eval_dataset"] = names_of_sets(self.eval_data)
        weights = None if self.initial_weights is None else str(self.initial_weights)
        return {
            **facts,
            "eval_metrics": sorted(self.eval_metrics),
            "initial_weights": weights,
            "state_components": [component.key for component in self.state_components],
        }


def model_source(model: nn.Module | None, model_init: ModelInit | None) -> ModelSource:
    """The one of the two that was given.

    Raises:
        ConfigurationError: If both or none were.
    """
    if model is not None and model_init is not None:
        raise ConfigurationError(
            "model_init", model_init, "cannot be given together with model", "give only one of the two"
        )
    source = model if model is not None else model_init
    if source is None:
        raise ConfigurationError(
            "model", None, "is missing, and model_init is missing too", "give one of the two"
        )
    return source


def optimizer_factory_of(
    factory: OptimizerFactory | None, cls_and_kwargs: OptimizerClass | None
) -> OptimizerFactory | None:
    """The factory, or one made of class and options.

    Raises:
        ConfigurationError: If both were given.
    """
    if cls_and_kwargs is None:
        return factory
    if factory is not None:
        raise ConfigurationError(
            "optimizer_cls_and_kwargs",
            cls_and_kwargs,
            "cannot be given together with optimizer_factory",
            "give only one of them",
        )
    cls, options = cls_and_kwargs
    return partial(_make_optimizer, cls, dict(options))


def check_inputs(args: TrainingArguments, parts: TrainerInputs, layout: ParallelLayout) -> None:
    """Refuse what contradicts the arguments or the layout, or would have no effect beside them.

    Raises:
        ConfigurationError: Naming the setting.
    """
    check_loss(args, parts.loss, parts.fused_loss)
    if parts.loss is not None:
        check_takes_targets(parts.loss, layout)
    check_recompute_fn(args, parts.recompute_fn)
    results = result_names(parts.eval_data, parts.eval_metrics)
    if args.tracks_best and args.best_metric not in results:
        raise ConfigurationError(
            "best_model_metric",
            args.best_metric,
            f"is not among the results of an evaluation: {', '.join(sorted(results))}",
            "name one of these",
        )
    fused = args.fused_loss != "no" or parts.fused_loss is not None
    if fused and parts.eval_metrics:
        raise ConfigurationError(
            "eval_metrics",
            sorted(parts.eval_metrics),
            "needs logits, which a fused loss never computes",
            "leave one of them out",
        )
    if args.fuse_optim_with_backward and _several_factories(parts.optimizer_groups):
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "works with one optimizer, but optimizer_groups make several",
            "leave the factories out of optimizer_groups",
        )
    for number, component in enumerate(parts.state_components):
        others = {*RUN_COMPONENTS, *(other.key for other in parts.state_components[:number])}
        if component.key in others:
            raise ConfigurationError(
                "state_components",
                component.key,
                "is the key of another component of the checkpoint",
                "give it a key of its own",
            )
    if parts.optimizer is not None:
        _refuse_beside(args, _OF_OPTIMIZER, "an optimizer of your own")
    elif args.optim == "schedule_free_adamw":
        schedule_free_class()
        if parts.scheduler is not None:
            raise ConfigurationError(
                "lr_scheduler_factory",
                parts.scheduler,
                f"changes the learning rate, and optim={args.optim!r} averages weights instead of that",
                "leave it out, and use warmup_steps for the warm-up",
            )
    if parts.scheduler is not None:
        _refuse_beside(args, _OF_SCHEDULE, "lr_scheduler_factory")


def check_begins_anew(parts: TrainerInputs, callbacks: Iterable[object]) -> None:
    """Refuse to train anew with what another run has left its state in.

    Raises:
        ConfigurationError: Naming the first such thing.
    """
    used = {
        "model was given instead of model_init": isinstance(parts.model, nn.Module),
        "train_dataset is a loader that keeps its position": hasattr(parts.train_data, "load_state_dict"),
        "state_components were given": bool(parts.state_components),
        **{
            f"the callback {callback_name(each)} keeps a state": hasattr(each, "load_state_dict")
            for each in callbacks
        },
    }
    for reason, holds in used.items():
        if holds:
            raise ConfigurationError(
                "fresh",
                True,
                f"cannot begin anew in a trainer that has trained, because {reason}",
                "make a new Trainer, with all its parts made anew, and call its train(fresh=True)",
            )


def _refuse_beside(args: TrainingArguments, names: Sequence[str], what: str) -> None:
    """Refuse settings that differ from the defaults of their class, and that `what` takes the place of."""
    for field in fields(args):
        value = getattr(args, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in names and value != default:
            raise ConfigurationError(
                field.name,
                value,
                f"has no effect together with {what}",
                f"pass it to the optimizer instead and remove {field.name}",
            )


_opened: DistributedEnvironment | None = None
"""What `environment_of` has opened for trainers of this process; it closes when the process ends."""


def environment_of(args: TrainingArguments) -> DistributedEnvInterface:
    """The environment of the job: of the process group that exists, or else of what the launcher says.

    A launcher such as torchrun names the ranks in environment variables. Their group is formed here once and
    serves all trainers of this process; it closes when the process ends.

    Args:
        args: Its `use_cpu` and `device` choose the device.

    Raises:
        DistributedEnvironmentError: If variables of the launcher are missing or wrong, or ranks do not come.
    """
    global _opened
    if _opened is not None and _opened.is_open:
        if dist.is_initialized():
            return _opened
        _opened.close()  # somebody has destroyed its group
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return StaticDistributedEnvironment(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            device=_device(args, local_rank),
        )
    device = _device(args, None)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _opened = DistributedEnvironment(no_accelerator=device.type == "cpu").open()
        return _opened
    if (problem := unused_launcher()) is not None:
        logger.warning("%s", problem)
    return StaticDistributedEnvironment(device=device)


def _device(args: TrainingArguments, index: int | None) -> torch.device:
    """The device that the arguments name, or the accelerator if any."""
    if args.use_cpu:
        return torch.device("cpu")
    if args.device is not None:
        return _known_device(args.device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or index is None:
        return accelerator or torch.device("cpu")
    return torch.device(accelerator.type, index)


def check_device(args: TrainingArguments, env: DistributedEnvInterface) -> None:
    """Refuse an environment that contradicts `use_cpu` or `device`.

    Raises:
        ConfigurationError: If it does.
    """
    wanted = "cpu" if args.use_cpu else args.device
    if wanted is None:
        return
    device = _known_device(wanted)
    same = device.type == env.device.type and device.index in (None, env.device.index)
    if not same:
        setting, value = ("use_cpu", True) if args.use_cpu else ("device", args.device)
        raise ConfigurationError(
            setting,
            value,
            f"contradicts the environment, which is on {env.device}",
            "set both to the same device",
        )


def _known_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigurationError(
            "device", name, f"is not a device: {reason}", "use 'cpu' or 'cuda:0', for example"
        ) from error


def _several_factories(groups: OptimizerGroups | None) -> bool:
    return any("factory" in options for options in (groups or {}).values())


def _make_optimizer(
    cls: Callable[..., Optimizer], options: dict[str, object], named: NamedParameters
) -> Optimizer:
    return cls(named, **options)  # each class has options of its own


class TrainerOptions(TypedDict, total=False):
    """What `Trainer` takes besides the arguments; see there."""

    model: nn.Module | None
    model_init: ModelInit | None
    initial_weights: str | Path | None
    train_dataset: TrainData | None
    eval_dataset: EvalData | None
    data_collator: Collator | None
    processing_class: Preprocessor | None
    callbacks: Iterable[object] | None
    compute_loss_func: TokenLoss | None
    fused_loss_factory: FusedLossFactory | None
    eval_metrics: Mapping[str, EvalMetric] | None
    distributed_env: DistributedEnvInterface | None
    optimizer_factory: OptimizerFactory | None
    optimizer_cls_and_kwargs: OptimizerClass | None
    optimizer_groups: OptimizerGroups | None
    lr_scheduler_factory: SchedulerFactory | None
    activation_checkpointing_fn: RecomputeFn | None
    parallel: Sequence[ModelTransform]
    state_components: Sequence[StateComponent]
