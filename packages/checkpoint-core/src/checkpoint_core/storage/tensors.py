"""The part of a tensor that one rank holds, and its values as they lie in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import torch

from checkpoint_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor in one dimension, one behind the other in memory, as the tensor shows them.

    Args:
        tensor: A plain dense tensor of any strides.

    Returns:
        A tensor of stride 1, whose bytes can be taken from ``data_ptr``; a copy only where it must be one.
    """
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # reshape(-1) keeps any stride of a single element, with which it has no view as bytes.
    return dense.as_strided((dense.numel(),), (1,))


def check_memory(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose storage was freed or made smaller since: its elements lie in memory of others.

    Args:
        tensor: A plain dense tensor.
        where: Its place, for the message.

    Raises:
        CheckpointError: The storage does not hold all elements.
    """
    if not tensor.numel():
        return
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + steps + 1) * tensor.element_size()
    if (held := tensor.untyped_storage().nbytes()) < needed:
        raise CheckpointError(
            f"{where} has lost its memory: its storage has {held} bytes, and its values need {needed}. Save "
            "or load before the storage is resized, or once it has its size again."
        )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two plain tensors of one shape hold the same bits of the same dtype, also in NaNs."""
    first, second = (in_order(side.detach().cpu()).view(torch.uint8) for side in (left, right))
    return left.dtype == right.dtype and torch.equal(first, second)


def copy_values(target: torch.Tensor, values: torch.Tensor, where: str) -> None:
    """Copy values into a tensor whose elements may share memory with one another, as after ``expand``.

    Args:
        target: A plain tensor of any strides, dtype and device.
        values: A plain tensor of its shape.
        where: The name of the target, for messages.

    Raises:
        CheckpointError: Elements that share memory would get different values, or the dtype of the target
            cannot hold them; it may round.
    """
    with torch.no_grad():
        if _may_overlap(target):
            extent = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
            trial = torch.empty(extent, dtype=values.dtype).as_strided(target.shape, target.stride())
            _once(trial, target).copy_(_once(values, target))
            if not same_bits(trial, values):
                raise CheckpointError(
                    f"{where} is a view whose elements share memory (shape {list(target.shape)}, strides "
                    f"{list(target.stride())}), but other values are stored for some of them. Build the "
                    "object as it was when it was saved, or give it a contiguous() tensor."
                )
        _once(target, target).copy_(_once(_castable(values, target.dtype, where), target))


def _castable(values: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Values that a cast at most rounds, without an imaginary part that is zero; refuses others."""
    stored = values.dtype
    if dtype == stored or not values.numel():
        return values
    kept = True
    if stored.is_complex and not dtype.is_complex:
        values, kept = values.real, not bool(values.imag.any())
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if not kept or not _survive(parts, dtype.to_real()):
        raise CheckpointError(
            f"{where} is stored as {stored}, with values that {dtype} cannot hold, not even rounded. Build "
            f"the object with {stored} for it, and convert it once it is loaded."
        )
    return values


def _survive(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether real values keep their size in a real dtype, and integers all of their digits."""
    if not (values.is_floating_point() and dtype.is_floating_point):
        cast = values.to(dtype)
        same_sign = torch.equal(cast.float() < 0, values.float() < 0)  # Of 255 and -1, the bits are the same.
        return same_sign and torch.equal(cast.to(values.dtype), values)
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= largest:
        return True
    if values.dtype.itemsize == 1:
        values = values.float()  # What follows is not there for float8.
    if bool(torch.linalg.vector_norm(values, ord=torch.inf) <= largest):
        return True
    # Overflow makes some dtypes infinite and others their largest number. A NaN compares as in range.
    beyond = values[values.abs() > largest]
    cast = beyond.to(dtype).to(beyond.dtype)
    rounded = beyond.isfinite() & ((cast - beyond).abs() <= torch.finfo(dtype).eps * beyond.abs())
    return bool((rounded | (cast == beyond)).all())


def _once(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor without what the target repeats: PyTorch refuses to write along a dimension of stride 0."""
    for dim, step in enumerate(target.stride()):
        if step == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory; False is certain."""
    if not tensor.numel():
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


@dataclass(frozen=True)
class LocalPart:
    """What this rank holds of a tensor, which may be all of it."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the part begins, along each dimension of the whole."""
    data: torch.Tensor
    """The part; shares memory with the tensor."""
    holders: tuple[int, ...] | None
    """Global ranks that hold this same part of a DTensor, ascending; None for a plain tensor."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """The part as consecutive elements of the whole tensor in row-major order.

        Yields:
            First element in the whole, and number of elements; in the order of the part's own memory.
        """
        sizes = tuple(self.data.shape)
        if 0 in sizes:
            return
        inner = len(sizes)
        while inner and sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        # Dimensions from `inner` on are complete, so one run spans a range of dimension inner - 1.
        outer = max(inner - 1, 0)
        length = prod(sizes[outer:])
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        start = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        for index in product(*(range(size) for size in sizes[:outer])):
            yield start + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def is_sharded(tensor: torch.Tensor) -> TypeGuard["DTensor"]:
    """Whether a tensor is a DTensor. Asked by attribute, because importing the class is slow."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor, where: str) -> LocalPart:
    """What this rank holds of a tensor.

    Args:
        tensor: A plain tensor or a DTensor.
        where: Its place, for messages.

    Returns:
        The part. For a DTensor the box is the one that ``torch.distributed.checkpoint`` would save.

    Raises:
        CheckpointError: The placement has no such box, such as partial sums, or the memory was freed.
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return LocalPart(tuple(tensor.shape), (0,) * tensor.ndim, tensor, None)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{where} holds partial sums ({tensor.placements}). Reduce it with redistribute() before saving."
        )
    ranges, local = local_ranges(tensor), tensor.to_local()
    sizes = tuple(sum(map(len, each)) for each in ranges)
    misfit = sizes != tuple(local.shape) and (any(sizes) or local.numel() > 0)
    if misfit or any(len(each) > 1 for each in ranges):
        raise CheckpointError(
            f"{where} is placed as {tensor.placements}, which gives a rank more than one box of it. Give it "
            "Shard and Replicate placements with redistribute() before saving."
        )
    check_memory(local, where)
    offsets = tuple(each[0].start if each else 0 for each in ranges)
    return LocalPart(tuple(tensor.shape), offsets, local, _holders(tensor))


def local_ranges(tensor: "DTensor") -> list[list[range]]:
    """Which indices of the whole tensor are those of this rank's part of a DTensor.

    The part is the one that ``distribute_tensor`` and ``fully_shard`` give a rank, uneven and empty shards
    included. There is no communication.

    Args:
        tensor: A DTensor of any shape and mesh, with Shard, _StridedShard and Replicate placements.

    Returns:
        For each dimension the ranges of indices, in the order in which the local tensor has them. It is one
        range as a rule, several where a strided shard is not sharded any further, and none where the part is
        empty.

    Raises:
        CheckpointError: A placement does not say which elements a rank holds, as Partial does not.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [[] for _ in tensor.shape]
    ranges = [[range(size)] if size else [] for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} is placed as {tensor.placements}, which does not "
                "say what each rank holds of it. Give it Shard and Replicate placements with "
                "redistribute()."
            )
        shards, place = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # Private in torch 2.11 to 2.13: a _StridedShard divides `split_factor` pieces, each on its own, for a
        # dimension of the mesh further right has divided the tensor before. test_local_ranges.py compares.
        pieces = getattr(placement, "split_factor", 1)
        whole = range(sum(map(len, ranges[placement.dim])))
        held = [_chunk(_chunk(whole, pieces, piece), shards, place) for piece in range(pieces)]
        ranges[placement.dim] = _select(ranges[placement.dim], held)
    return ranges


def _chunk(indices: range, chunks: int, number: int) -> range:
    """One chunk of indices, as torch.chunk divides them; the last ones may be empty."""
    size = -(-len(indices) // chunks)
    return indices[number * size : (number + 1) * size]


def _select(ranges: list[range], positions: list[range]) -> list[range]:
    """The indices at some positions of others, neighbouring ranges joined."""
    found: list[range] = []
    for wanted in positions:
        passed = 0
        for indices in ranges:
            taken = indices[max(wanted.start - passed, 0) : max(wanted.stop - passed, 0)]
            passed += len(indices)
            if taken and found and found[-1].stop == taken.start:
                taken = range(found.pop().start, taken.stop)
            if taken:
                found.append(taken)
    return found


def mesh_ranks(tensor: "DTensor") -> tuple[int, ...]:
    """Global ranks of the mesh over which a tensor is placed, ascending."""
    return tuple(sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist()))


def parts_among(tensor: "DTensor", ranks: range) -> tuple[int, int]:
    """How much of a tensor a set of ranks holds together.

    Args:
        tensor: The tensor.
        ranks: Global ranks.

    Returns:
        Number of different parts on those ranks, and number of parts in all.
    """
    mesh = tensor.device_mesh.mesh
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    held = {
        tuple(place[dim] for dim in sharded)
        for place in product(*(range(size) for size in mesh.shape))
        if int(mesh[place]) in ranks
    }
    return len(held), prod(mesh.shape[dim] for dim in sharded)


def _holders(tensor: "DTensor") -> tuple[int, ...]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(int(rank) for rank in mesh.mesh[index].flatten().tolist()))
