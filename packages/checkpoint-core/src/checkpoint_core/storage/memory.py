"""Values of tensors as they lie in memory, which strides, expansion and pending signs make another thing."""

import torch

from checkpoint_core.errors import CheckpointError


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
            "or load before the storage is resized, or once it has its size again"
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
                    f"{list(target.stride())}), but other values are stored for some of them; build the "
                    "object as it was when it was saved, or give it a contiguous() tensor"
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
            f"{where} is stored as {stored}, with values that {dtype} cannot hold, not even rounded; build "
            f"the object with {stored} for it, and convert it once it is loaded"
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
