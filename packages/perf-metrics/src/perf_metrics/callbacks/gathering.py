"""Figures of all ranks, as JSON in tensors: what other ranks send is read, never unpickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_MOST_BYTES = 1 << 20
"""Of the figures of one rank; far more than any callback has to tell."""


def world_size() -> int:
    """Ranks of the default process group, 1 without one."""
    if "torch" not in sys.modules:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(value: object, read: Callable[[object], T]) -> list[T]:
    """Return what all ranks tell, in their order; a collective call if there is a process group.

    Args:
        value: What this rank tells: anything that JSON holds.
        read: Makes something of what a rank tells; may raise ValueError or TypeError.

    Raises:
        RuntimeError: A rank told something that cannot be read.
    """
    if world_size() == 1:
        return [read(value)]
    import torch
    import torch.distributed as dist

    # Of a group for accelerators only, as nccl forms, no tensor may be on the CPU.
    on_cpu = "cpu" in dist.get_backend_config()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    message = json.dumps(value).encode()
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(world_size())]
    dist.all_gather(lengths, length)
    sizes = [int(each) for each in lengths]
    for rank, size in enumerate(sizes):
        if not 0 < size <= _MOST_BYTES:
            raise RuntimeError(
                f"rank {rank} tells its figures in {size} bytes; do all ranks run one release?"
            )
    padded = bytearray(message.ljust(max(sizes)))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    parts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(parts, own)
    return [_read(bytes(part.tolist()), rank, read) for rank, part in enumerate(parts)]


def _read(message: bytes, rank: int, read: Callable[[object], T]) -> T:
    try:
        return read(json.loads(message))
    except (ValueError, TypeError, RecursionError) as error:
        raise RuntimeError(
            f"rank {rank} tells figures that cannot be read ({error}); do all ranks run one release?"
        ) from error
