"""What is done about memory while a model trains: activation offload, garbage collection."""

from .garbage import GarbagePolicy
from .offload import activation_offload, check_activation_offload

__all__ = ["GarbagePolicy", "activation_offload", "check_activation_offload"]
