"""Autocast and the precision of float32 products, for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..arguments import BaseTrainingArguments

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(args: BaseTrainingArguments, device_type: str) -> AbstractContextManager[object]:
    """The autocast context of a forward pass; nothing without mixed precision.

    Args:
        args: `mixed_precision`: None, "no", "bf16" or "fp16".
        device_type: Where the model computes: "cpu", "cuda", ...
    """
    if args.mixed_precision in (None, "no"):
        return nullcontext()
    return torch.autocast(device_type, dtype=AUTOCAST_DTYPES[args.mixed_precision])


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
