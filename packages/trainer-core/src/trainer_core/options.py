"""The keyword arguments of a trainer, for subclasses that hand them on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from torch import nn

from checkpoint_core import Preprocessor, StateComponent
from dist_env import DistributedEnvInterface

from .distributed.transforms import ModelTransform
from .evaluation import EvalMetric
from .given import OptimizerClass
from .loaders import Collator
from .loss import FusedLossFactory, TokenLoss
from .model import ModelInit
from .optimization import OptimizerFactory, OptimizerGroups, SchedulerFactory


class TrainerOptions(TypedDict, total=False):
    """What `Trainer` takes besides the arguments; see there."""

    model: nn.Module | None
    model_init: ModelInit | None
    initial_weights: str | Path | None
    train_dataset: object | None
    eval_dataset: object | None
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
    parallel: Sequence[ModelTransform]
    state_components: Sequence[StateComponent]
