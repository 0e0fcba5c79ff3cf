"""Optimizers, their parameter groups, and learning-rate schedules."""

from .averaging import AveragedWeights, average_weights
from .groups import OptimizerGroups, ParameterGroups, build_optimizer, optimizer_table
from .optimizers import (
    Multiopt,
    NamedParameters,
    OptimizerFacade,
    OptimizerFactory,
    OptimizerInBackward,
    build_adamw,
    decay_exemptions,
    schedule_free_class,
)
from .schedules import FactorSchedule, PlateauSchedule, SchedulerFactory, build_schedule, is_callback

__all__ = [
    "AveragedWeights",
    "FactorSchedule",
    "Multiopt",
    "NamedParameters",
    "OptimizerFacade",
    "OptimizerFactory",
    "OptimizerGroups",
    "OptimizerInBackward",
    "ParameterGroups",
    "PlateauSchedule",
    "SchedulerFactory",
    "average_weights",
    "build_adamw",
    "build_optimizer",
    "build_schedule",
    "decay_exemptions",
    "is_callback",
    "optimizer_table",
    "schedule_free_class",
]
