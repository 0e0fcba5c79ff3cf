"""Memory of each stage of a pipeline before anything of it is allocated."""

from .planner import plan
from .stage_memory import PipelinePlan, StageMemory

__all__ = ["PipelinePlan", "StageMemory", "plan"]
