"""Values as tensors of bytes between ranks. What comes is decoded, never unpickled.

torch's own object collectives unpickle, and need numpy in some releases that this package supports (2.11).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_env.decoding import decode_value
from dist_env.encoding import encode_value
from dist_env.errors import RankFailedError

_UNFIT = -1
"""In place of a size: the rank has a value that cannot be sent."""


def broadcast_encoded(
    obj: object, src: int, group: dist.ProcessGroup | None, own_device: torch.device
) -> object:
    """The value of global rank `src`, on every rank of the group.

    Args:
        obj: The value; only that of `src` counts.
        src: Global rank of the sender.
        group: Process group; None means the default one.
        own_device: Accelerator of this rank, for groups that do not serve the CPU.

    Raises:
        TypeError: The value cannot be sent; on every rank.
        RankFailedError: What came cannot be read.
    """
    device = _device_for(group, own_device)
    is_source = dist.get_rank() == src
    data, problem = _encoded(obj) if is_source else (b"", None)
    size = torch.tensor([_UNFIT if problem else len(data)], device=device)
    dist.broadcast(size, src=src, group=group)
    _raise_unfit([int(size.item())], [src], problem)
    on_device = _zeros(int(size.item()), src, device)
    if is_source:
        on_device.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(on_device, src=src, group=group)
    return obj if is_source else _decoded(_to_bytes(on_device), src)


def gather_encoded(obj: object, group: dist.ProcessGroup | None, own_device: torch.device) -> list[object]:
    """The values of all ranks of the group, in the order of its ranks, on every rank.

    Args:
        obj: The value of this rank.
        group: Process group; None means the default one.
        own_device: Accelerator of this rank, for groups that do not serve the CPU.

    Raises:
        TypeError: The value of some rank cannot be sent; on every rank.
        RankFailedError: What came from some rank cannot be read.
    """
    device = _device_for(group, own_device)
    ranks = dist.get_process_group_ranks(group)
    data, problem = _encoded(obj)
    own = torch.tensor([_UNFIT if problem else len(data)], device=device)
    sizes = [torch.zeros_like(own) for _ in ranks]
    dist.all_gather(sizes, own, group=group)
    lengths = [int(size.item()) for size in sizes]
    _raise_unfit(lengths, ranks, problem)
    longest = max(lengths)
    # Ranks must send equally long tensors.
    padded = _zeros(longest, ranks[lengths.index(longest)], device)
    padded[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    received = [_zeros(longest, rank, device) for rank in ranks]
    dist.all_gather(received, padded, group=group)
    parts = zip(received, lengths, ranks, strict=True)
    return [_decoded(_to_bytes(tensor[:length]), rank) for tensor, length, rank in parts]


def _encoded(obj: object) -> tuple[bytes, TypeError | None]:
    try:
        return encode_value(obj, name="the object"), None
    except TypeError as error:
        # Raised when the others know, who would wait for this rank.
        return b"", error


def _decoded(data: bytes, rank: int) -> object:
    try:
        return decode_value(data)
    except ValueError as error:
        raise _unreadable(rank, error) from error


def _raise_unfit(sizes: Sequence[int], ranks: Sequence[int], own: TypeError | None) -> None:
    if own is not None:
        raise own
    for size, rank in zip(sizes, ranks, strict=True):
        if size == _UNFIT:
            raise TypeError(
                f"the object of rank {rank} cannot be sent to other ranks; its own error says why"
            )
        if size <= 0:
            raise _unreadable(rank, f"it is said to have {size} bytes")


def _unreadable(rank: int, reason: object) -> RankFailedError:
    return RankFailedError(
        f"exchanging objects: rank {rank} sent a message that cannot be read: {reason}. Run the same "
        "releases on all ranks, import the same modules, and let nobody else reach their network",
        rank,
    )


def _zeros(size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Memory for a message of a size that a rank has told."""
    try:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise _unreadable(rank, error) from error


def _to_bytes(tensor: torch.Tensor) -> bytes:
    buffer = bytearray(tensor.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return bytes(buffer)


def _device_for(group: dist.ProcessGroup | None, own_device: torch.device) -> torch.device:
    """A device that the group can carry."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if own_device.type != "cpu" or accelerator is None:
        return own_device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
