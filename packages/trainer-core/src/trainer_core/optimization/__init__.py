"""Optimizers, their parameter groups, and learning-rate schedules."""

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
    "decay_exemptions",
    "is_callback",
    "optimizer_table",
]
