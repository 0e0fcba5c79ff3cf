"""Tensors of all ranks made into one, in a few large messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer_core import CommBytes

BUCKET_BYTES = 64 * 2**20
"""Upper limit of a message. Larger ones gain nothing, and each needs a buffer of its size."""

Key = TypeVar("Key", bound=Hashable)


class RankCombiner:
    """Makes one value of the values that ranks have: means, or those of the first rank.

    Args:
        group: The ranks; none for one process, whose values are the combined ones.
        device: Where messages are sent from. Tensors elsewhere, such as step counts on the host, go there
            and back, because most backends serve one kind of device.
        traffic: Counts what is sent.
        bucket_bytes: Upper limit of a message.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        traffic: CommBytes,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.world_size = 1 if group is None else dist.get_world_size(group)
        """Number of ranks."""
        self._group = group
        self._device = device
        self._traffic = traffic
        self._bucket_bytes = bucket_bytes

    @torch.no_grad()
    def combine(self, tensors: Mapping[Key, Tensor]) -> Iterator[dict[Key, Tensor]]:
        """Combine tensors, a bucket at a time; collective.

        Floating-point and complex tensors become their means, computed in float32 or the tensor's own type
        if that is wider. Other tensors are those of the first rank. The inputs stay as they are.

        Args:
            tensors: Of the same keys, shapes and dtypes in the same order on every rank.

        Yields:
            Combined tensors by key, equal on all ranks, in new memory on the device of the tensor given. All
            have to be taken, as every rank has to take part in every message.
        """
        for bucket in _buckets(tensors, self._bucket_bytes):
            first = next(iter(bucket.values()))
            dtype = working_dtype(first.dtype)
            flat = torch.empty(_numel(bucket), dtype=dtype, device=first.device)
            parts = _parts(flat, bucket)
            for key, part in parts.items():
                part.copy_(bucket[key])
            if self.world_size > 1 and flat.numel():
                # Parts are views, so the result has to come back into the same memory.
                flat.copy_(self._sent(flat))
            yield parts

    def same_on_all_ranks(self, numbers: list[int]) -> list[bool]:
        """For each number, whether it is the same on all ranks; collective.

        Args:
            numbers: Equally many on every rank, each between -2**62 and 2**62.
        """
        if self.world_size == 1 or not numbers:
            return [True] * len(numbers)
        mine = torch.tensor(numbers, dtype=torch.int64)
        # The largest and, with the sign turned, the smallest in one message.
        extremes = torch.cat([mine, -mine]).to(self._device)
        self._traffic.add(extremes)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = extremes.cpu().chunk(2)
        same: list[bool] = (largest == -smallest).tolist()
        return same

    def _sent(self, flat: Tensor) -> Tensor:
        there = flat.to(self._device)
        averaged = _has_mean(flat.dtype)
        # The bytes themselves: not every backend knows every integer type.
        payload = there if averaged else there.view(torch.uint8)
        for message in torch.split(payload, max(1, self._bucket_bytes // payload.element_size())):
            self._traffic.add(message)
            if averaged:
                dist.all_reduce(message, group=self._group)
            else:
                dist.broadcast(message, group=self._group, group_src=0)
        return there.div_(self.world_size) if averaged else there


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which type values of a type are combined: float32 at least, where there is a mean."""
    if not _has_mean(dtype):
        return dtype
    smallest = torch.complex64 if dtype.is_complex else torch.float32
    return dtype if dtype.itemsize >= smallest.itemsize else smallest


def _has_mean(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _buckets(tensors: Mapping[Key, Tensor], limit: int) -> Iterator[dict[Key, Tensor]]:
    """Tensors of one dtype and device at a time, of `limit` bytes together or one alone."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[Key, Tensor]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.device, working_dtype(tensor.dtype)), {})[key] = tensor
    for (_, dtype), members in kinds.items():
        bucket: dict[Key, Tensor] = {}
        size = 0
        for key, tensor in members.items():
            more = tensor.numel() * dtype.itemsize
            if bucket and size + more > limit:
                yield bucket
                bucket, size = {}, 0
            bucket[key] = tensor
            size += more
        yield bucket


def _numel(tensors: Mapping[Key, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _parts(flat: Tensor, like: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Views of a flat tensor in the shapes of others."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {key: piece.view(like[key].shape) for key, piece in zip(like, pieces, strict=True)}
