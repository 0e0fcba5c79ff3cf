"""Record how tensors are computed while a model is being built, and compute them again."""

from .recorder import Recording, is_plain
from .replay import Constant, Version, View, constants, replay

__all__ = ["Constant", "Recording", "Version", "View", "constants", "is_plain", "replay"]
