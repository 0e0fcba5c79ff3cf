"""One model computed by several devices: plans, tensors, sequences, experts, and losses for them."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

if TYPE_CHECKING:
    from model_parallel.attention import attention_kernel
    from model_parallel.check import LayerShare, check_plan
    from model_parallel.context import CausalAttention, SequencePart, divide_sequences, undivided
    from model_parallel.experts import divide_experts
    from model_parallel.loss import is_sharded_head, sharded_cross_entropy, sharded_linear_cross_entropy
    from model_parallel.plan import STYLES, PlanError, tensor_plan
    from model_parallel.shard import shard_tensors
    from model_parallel.styles import whole_sequences

__all__ = [
    "STYLES",
    "CausalAttention",
    "LayerShare",
    "PlanError",
    "SequencePart",
    "attention_kernel",
    "check_plan",
    "divide_experts",
    "divide_sequences",
    "is_sharded_head",
    "shard_tensors",
    "sharded_cross_entropy",
    "sharded_linear_cross_entropy",
    "tensor_plan",
    "undivided",
    "whole_sequences",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
