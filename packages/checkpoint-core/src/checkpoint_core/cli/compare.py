"""How far the values of two stored tensors lie apart."""

from dataclasses import dataclass

import torch

from checkpoint_core.cli.stored import StoredTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1


@dataclass
class ValueDifference:
    """What differs between two tensors of one dtype and shape."""

    elements: int = 0
    """How many elements differ in their bits."""
    max_absolute: float = 0.0
    """The largest ``|a - b|``."""
    max_relative: float = 0.0
    """The largest ``|a - b| / max(|a|, |b|)``."""
    undefined: int = 0
    """Differing elements without a distance, because NaN or infinity is in one of them."""


def compare_values(a: StoredTensor, b: StoredTensor) -> ValueDifference:
    """Compare two tensors a piece at a time, bit by bit.

    Args:
        a: One tensor.
        b: Another one of the same dtype and shape.

    Returns:
        The difference; ``elements`` is 0 when all bits are equal.
    """
    result = ValueDifference()
    for left, right in zip(a.pieces(), b.pieces(), strict=True):
        bits = _BITS[left.element_size()]
        differing = left.view(bits) != right.view(bits)
        count = int(differing.sum())
        if count:
            result.elements += count
            _measure(left, right, differing, result)
    return result


def _measure(
    left: torch.Tensor, right: torch.Tensor, differing: torch.Tensor, result: ValueDifference
) -> None:
    x, y, distance = _distances(left, right)
    distance, larger = distance[differing], torch.maximum(x.abs(), y.abs())[differing]
    defined = distance.isfinite() & larger.isfinite()
    result.undefined += int((~defined).sum())
    distance, larger = distance[defined], larger[defined]
    if distance.numel():
        # The distance of 0.0 and -0.0 is 0, and so is what they are divided by.
        relative = distance / torch.where(larger == 0, 1.0, larger)
        result.max_absolute = max(result.max_absolute, float(distance.max()))
        result.max_relative = max(result.max_relative, float(relative.max()))


def _distances(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both as 64-bit numbers, and their distances."""
    if left.is_complex():
        x, y = left.to(torch.complex128), right.to(torch.complex128)
        return x.abs(), y.abs(), (x - y).abs()
    if left.is_floating_point():
        x, y = left.to(torch.float64), right.to(torch.float64)
        return x, y, (x - y).abs()
    # 64-bit integers do not fit a float64; their halves do, so neighbours stay apart.
    (high_x, low_x), (high_y, low_y) = _halves(left), _halves(right)
    scale = float(1 << _LOW_BITS)
    distance = ((high_x - high_y).double() * scale + (low_x - low_y).double()).abs()
    return high_x.double() * scale + low_x.double(), high_y.double() * scale + low_y.double(), distance


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unsigned = tensor.dtype == torch.uint64
    whole = tensor.view(torch.int64) if unsigned else tensor.to(torch.int64)
    high = whole >> _LOW_BITS
    return high & _LOW_MASK if unsigned else high, whole & _LOW_MASK
