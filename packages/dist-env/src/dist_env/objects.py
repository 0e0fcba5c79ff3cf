"""Python objects as tensors of bytes.

torch's own object collectives need numpy in some releases that this package supports (2.11); these do not.
"""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist


def broadcast_pickled(
    obj: object, src: int, group: dist.ProcessGroup | None, own_device: torch.device
) -> object:
    """The object of global rank `src`, on every rank of the group.

    Args:
        obj: The object; only that of `src` counts.
        src: Global rank of the sender.
        group: Process group; None means the default one.
        own_device: Accelerator of this rank, for groups that do not serve the CPU.
    """
    device = _device_for(group, own_device)
    is_source = dist.get_rank() == src
    data = bytearray(pickle.dumps(obj)) if is_source else bytearray()
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=src, group=group)
    buffer = data if is_source else bytearray(int(size.item()))
    on_host = torch.frombuffer(buffer, dtype=torch.uint8)
    on_device = on_host.to(device)
    dist.broadcast(on_device, src=src, group=group)
    if is_source:
        return obj
    on_host.copy_(on_device)
    return pickle.loads(buffer)


def gather_pickled(obj: object, group: dist.ProcessGroup | None, own_device: torch.device) -> list[object]:
    """The objects of all ranks of the group, in the order of its ranks, on every rank.

    Args:
        obj: The object of this rank.
        group: Process group; None means the default one.
        own_device: Accelerator of this rank, for groups that do not serve the CPU.
    """
    device = _device_for(group, own_device)
    count = dist.get_world_size(group)
    data = bytearray(pickle.dumps(obj))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    # Ranks must send equally long tensors.
    padded = data.ljust(max(lengths), b"\0")
    received = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(received, torch.frombuffer(padded, dtype=torch.uint8).to(device), group=group)
    return [
        pickle.loads(_to_bytes(tensor)[:length]) for tensor, length in zip(received, lengths, strict=True)
    ]


def _to_bytes(tensor: torch.Tensor) -> bytearray:
    buffer = bytearray(tensor.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return buffer


def _device_for(group: dist.ProcessGroup | None, own_device: torch.device) -> torch.device:
    """A device that the group can carry."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if own_device.type != "cpu" or accelerator is None:
        return own_device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
