"""Optimizers, their parameter groups, and learning-rate schedules."""

from ..distributed.clipping import own_part
from .adamw import NamedParameters, OptimizerFactory, build_adamw, decay_exemptions
from .clipping import clip_grad_norm
from .facade import OptimizerFacade
from .groups import OptimizerGroups, ParameterGroups, build_optimizer
from .in_backward import OptimizerInBackward
from .multi import Multiopt
from .nonfinite import NonFiniteGradientError, NonFiniteGuard, NonFinitePolicy, NonFiniteReport
from .plateau import PlateauSchedule
from .schedules import FactorSchedule, SchedulerFactory, build_schedule, is_callback
from .table import optimizer_table

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
