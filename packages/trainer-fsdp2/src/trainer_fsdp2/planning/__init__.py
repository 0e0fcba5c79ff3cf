"""Memory of a sharded run before anything of it is allocated, and the layout that fits."""

from .memory_plan import MemoryPlan
from .mesh import Mesh
from .planner import plan
from .recommendation import Recommendation, Rejected, recommend

__all__ = ["Mesh", "MemoryPlan", "Recommendation", "Rejected", "plan", "recommend"]
