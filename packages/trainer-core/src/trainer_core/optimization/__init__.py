"""Optimizers, their parameter groups, and learning-rate schedules."""

from ..distributed.clipping import own_part
from .gradients import (
    NonFiniteGradientError,
    NonFiniteGuard,
    NonFinitePolicy,
    NonFiniteReport,
    clip_grad_norm,
)
from .groups import OptimizerGroups, ParameterGroups, build_optimizer, optimizer_table
from .optimizers import (
    Multiopt,
    NamedParameters,
    OptimizerFacade,
    OptimizerFactory,
    OptimizerInBackward,
    build_adamw,
    decay_exemptions,
)
from .schedules import FactorSchedule, PlateauSchedule, SchedulerFactory, build_schedule, is_callback

__all__ = [
    "FactorSchedule",
    "Multiopt",
    "NamedParameters",
    "NonFiniteGradientError",
    "NonFiniteGuard",
    "NonFinitePolicy",
    "NonFiniteReport",
    "OptimizerFacade",
    "OptimizerFactory",
    "OptimizerGroups",
    "OptimizerInBackward",
    "ParameterGroups",
    "PlateauSchedule",
    "SchedulerFactory",
    "build_adamw",
    "build_optimizer",
    "build_schedule",
    "clip_grad_norm",
    "own_part",
    "decay_exemptions",
    "is_callback",
    "optimizer_table",
]
