"""Autocast and the precision of float32 products, for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .arguments import BaseTrainingArguments


def autocast(args: BaseTrainingArguments, device_type: str) -> AbstractContextManager[object]:
    """The autocast context of a forward pass; nothing without mixed precision."""
    if args.mixed_precision == "bf16":
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def matmul_precision(args: BaseTrainingArguments) -> Iterator[None]:
    """Set the precision of float32 products, and set it back afterwards."""
    if args.float32_matmul_precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
