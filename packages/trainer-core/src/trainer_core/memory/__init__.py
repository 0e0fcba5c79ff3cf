"""Memory while a model trains: activation offload, garbage collection, and what plans of it share."""

from .attention import attention_of_gpus
from .garbage import GarbagePolicy
from .live_bytes import LiveBytes
from .margin import MARGIN_STANDS_FOR, margin_of
from .offload import activation_offload, check_activation_offload
from .planned_batch import PlannedBatch

__all__ = [
    "MARGIN_STANDS_FOR",
    "GarbagePolicy",
    "LiveBytes",
    "PlannedBatch",
    "activation_offload",
    "attention_of_gpus",
    "check_activation_offload",
    "margin_of",
]
