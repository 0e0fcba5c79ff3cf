"""The formula held against the counter, layer type by layer type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .accounts import KINDS, SHORT_CONVOLUTION, STATE_SCAN, FlopsPerToken, FlopsUnknownError
from .counting import CountedFlops, count_flops
from .per_token import ModelFlops, warn_once

if TYPE_CHECKING:
    from torch import nn

_NOT_COMPARED = (STATE_SCAN, SHORT_CONVOLUTION)
"""What the scan costs depends on how it is cut into chunks; a short convolution is padded."""


@dataclass(frozen=True)
class ComparedPart:
    """FLOPs per token of one layer type, by formula and as counted; None where one has no such part."""

    kind: str
    formula: float | None
    counted: float | None

    @property
    def agrees(self) -> bool:
        """Whether the two differ by less than a thousandth."""
        if self.formula is None or self.counted is None:
            return False
        return abs(self.formula - self.counted) <= 1e-3 * max(self.formula, self.counted)


@dataclass(frozen=True)
class FlopsComparison:
    """The formula beside the counter, both with every score counted ("dense") and nothing counted twice.

    Attributes:
        model: Class of the model.
        sequence_length: In tokens.
        formula: What the formula, or the model itself, says.
        counted: What was counted.
        parts: By layer type. State scans and short convolutions are shown and not compared.
    """

    model: str
    sequence_length: int
    formula: FlopsPerToken
    counted: CountedFlops
    parts: tuple[ComparedPart, ...]

    @property
    def ratio(self) -> float:
        """Formula over counter, of what is compared."""
        left_out = [part for part in self.parts if part.kind in _NOT_COMPARED]
        formula = self.formula.total - sum(part.formula or 0.0 for part in left_out)
        counted = self.counted.model - sum(part.counted or 0.0 for part in left_out)
        return formula / counted if counted else 1.0

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """The layer types that differ."""
        return tuple(p.kind for p in self.parts if p.kind not in _NOT_COMPARED and not p.agrees)

    def warning(self, tolerance: float = 0.05) -> str | None:
        """A sentence that names the layer types, if the two differ by more than the tolerance; else None."""
        if abs(self.ratio - 1) <= tolerance:
            return None
        named = [part for part in self.parts if part.kind in self.disagreeing]
        figures = "; ".join(f"{p.kind}: {_text(p.formula)}, counted {_text(p.counted)}" for p in named)
        details = figures or "it gives one number for all"
        return (
            f"model FLOPs of {self.model} are {self.ratio:.2f} times what torch counts at "
            f"{self.sequence_length} tokens ({details}, FLOPs per token); MFU is wrong by as much if the "
            "formula is: give the model a method flops_per_token(sequence_length) then"
        )


def compare_flops(
    model: nn.Module, sequence_length: int, *, flops: ModelFlops | None = None
) -> FlopsComparison:
    """Hold the formula against torch's counter for this very model.

    Args:
        model: The model, on any device; it stays as it is. See `count_flops`.
        sequence_length: In tokens.
        flops: What is known of the model already.

    Raises:
        ValueError: `sequence_length` is not a positive integer.
        FlopsUnknownError: One of the two cannot tell, with the reason.
    """
    known = ModelFlops(model, sequence_length) if flops is None else flops
    formula = known.per_token(sequence_length, causal="dense")
    counted = count_flops(model, sequence_length) if known.counted is None else known.counted
    by_formula = {part.kind: part.total for part in formula.parts}
    by_count = {part.kind: part.forward + part.backward for part in counted.parts}
    parts = tuple(
        ComparedPart(kind, by_formula.get(kind), by_count.get(kind))
        for kind in KINDS
        if kind in by_formula or (formula.parts and kind in by_count)
    )
    return FlopsComparison(type(model).__name__, sequence_length, formula, counted, parts)


def warn_of_disagreement(
    model: nn.Module, sequence_length: int, *, flops: ModelFlops | None = None
) -> CountedFlops | None:
    """Count a model once, and warn if the formula is more than 5 % off.

    The warning goes to the logger "perf_metrics" and names the layer types.

    Args:
        model: The model, on any device; it stays as it is.
        sequence_length: In tokens.
        flops: What is known of the model already.

    Returns:
        What was counted; None if the model cannot be counted, or its FLOPs are not known.
    """
    if flops is not None and flops.counted is not None:
        return flops.counted
    try:
        comparison = compare_flops(model, sequence_length, flops=flops)
    except FlopsUnknownError as reason:
        warn_once(f"neither checked nor counted for HFU: {reason}")
        return None
    if (text := comparison.warning()) is not None:
        warn_once(text)
    return comparison.counted


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
