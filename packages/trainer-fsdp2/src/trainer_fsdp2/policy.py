"""Dtypes and places: what layers compute in, what gradients travel in, where the shards rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .arguments import FSDP2Arguments

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def precision_policy(settings: FSDP2Arguments) -> MixedPrecisionPolicy:
    """What `fully_shard` is told about dtypes."""
    param = None if settings.param_dtype is None else _DTYPES[settings.param_dtype]
    reduce = None if settings.reduce_dtype is None else _DTYPES[settings.reduce_dtype]
    if reduce is None and param is not None:
        reduce = torch.float32  # sums over many ranks lose small gradients in 16 bits
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def offload_policy(settings: FSDP2Arguments, device: torch.device) -> OffloadPolicy:
    """What `fully_shard` is told about where shards rest."""
    if not settings.cpu_offload:
        return OffloadPolicy()
    # There is nothing to copy to, and so nothing to pin, where ranks compute on the host itself.
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def dtype_table(model: nn.Module, policy: MixedPrecisionPolicy, autocast: str | None) -> str:
    """The dtypes of a sharded model, to print: kind, dtype, share of the parameters.

    Args:
        model: The model.
        policy: What it was sharded with.
        autocast: `mixed_precision` of the arguments.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    masters = ", ".join(f"{_name(dtype)} ({size:,})" for dtype, size in sizes.items()) or "none"
    rows = [
        ("weights the optimizer steps", masters),
        ("weights layers compute with", _name(policy.param_dtype) if policy.param_dtype else "the same"),
        ("matrix products", {"bf16": "bfloat16 (autocast)"}.get(autocast or "", "in the weights' dtype")),
        ("gradients travel as", _name(policy.reduce_dtype) if policy.reduce_dtype else "computed"),
        ("gradients the optimizer gets", ", ".join(map(_name, sizes)) or "none"),
    ]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what.ljust(width)}  {dtype}" for what, dtype in rows)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
