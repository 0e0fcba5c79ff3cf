"""Record how tensors are computed while a model is being built, and compute them again."""

from .interception import is_plain
from .recorder import Recording
from .replay import Constant, Version, View, constants, replay

__all__ = ["Constant", "Recording", "Version", "View", "constants", "is_plain", "replay"]
