"""Model FLOPs per token by the accounting of PaLM (arXiv:2204.02311, appendix B), checked by the counter.

One multiply-add is 2 FLOPs. A weight used in a matrix multiplication costs 2 FLOPs per token forward, 2 for
the gradient of its input and 2 for its own gradient: 6 N. Attention scores and their product with the values
cost 4 L d S forward and 8 L d S backward: 12 L d S, or half of it for kernels that skip the masked triangle.
Recomputation of activations does not count.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .architecture import (
    KINDS,
    SHORT_CONVOLUTION,
    STATE_SCAN,
    Architecture,
    FlopsPerToken,
    FlopsUnknownError,
    between,
    check_length,
    grid_around,
    halved,
)
from .attention import Causal, check_causal
from .counting import CountedFlops, count_flops
from .read_architecture import architecture_of_model

if TYPE_CHECKING:
    from torch import nn

FlopsSource: TypeAlias = Literal["model", "formula", "counter"]

_log = logging.getLogger("perf_metrics")


def palm_flops_per_token(
    n_parameters: float,
    n_layers: int,
    d_attention: int,
    sequence_length: int,
    *,
    causal: Literal["full", "half"] = "full",
) -> float:
    """Return 6 N + 12 L d S, the training FLOPs per token of PaLM's appendix B.

    Published tables differ in what they put into N (with or without embeddings) and in `causal`; with plain
    numbers each of them can be computed.

    Args:
        n_parameters: N, the parameters counted.
        n_layers: L, the layers with attention.
        d_attention: d, heads times head size.
        sequence_length: S, in tokens.
        causal: "full" counts the whole score matrix, "half" only the triangle that causal kernels compute.

    Raises:
        ValueError: A number is negative, or `causal` is neither "full" nor "half".
    """
    check_causal(causal)
    numbers = {"n_parameters": n_parameters, "n_layers": n_layers, "d_attention": d_attention}
    for name, number in {**numbers, "sequence_length": sequence_length}.items():
        if not number >= 0 or math.isinf(number):
            raise ValueError(f"{name}={number!r} must be a finite number, 0 or more.")
    return 6.0 * n_parameters + 12.0 * n_layers * d_attention * sequence_length * (
        0.5 if causal == "half" else 1.0
    )


class ModelFlops:
    """Model FLOPs per token of one model, at any sequence length.

    Where they come from is settled once, in this order:

    - "model": its own method `flops_per_token(sequence_length)`, which returns a `FlopsPerToken` in the
      "full" convention, or one number for everything, which cannot be halved, or None if it does not know;
    - "formula": its modules and `config`, see `architecture_of_model`;
    - "counter": torch's formulas for the operators that it calls, see `count_flops`. The first few lengths
      that are asked for are counted; then lengths at eight steps to the octave, and what lies between two of
      them is taken from the line between.

    Args:
        model: The model itself, on any device, meta included; of `DistributedDataParallel`, its `module`.
        sequence_length: A usual length, in tokens, at which the model can be run.

    Raises:
        ValueError: `sequence_length` is not a positive integer.

    Attributes:
        source: Which of the three it is; None if the FLOPs cannot be told.
        reason: Why the ones before it, or all of them, could not tell; empty for the first that could.
        counted: What was counted at the usual length, if that is where they come from.
    """

    def __init__(self, model: nn.Module, sequence_length: int) -> None:
        check_length(sequence_length)
        self._model = model
        self._architecture: Architecture | None = None
        self._by_length: dict[int, CountedFlops] = {}
        self.counted: CountedFlops | None = None
        self.source: FlopsSource | None = None
        self.reason = ""
        if callable(getattr(model, "flops_per_token", None)):
            self.source = "model"
            return
        try:
            self._architecture = architecture_of_model(model)
            self.source = "formula"
        except FlopsUnknownError as reason:
            self.reason = str(reason)
            self._count(sequence_length)

    def _count(self, sequence_length: int) -> None:
        try:
            self.counted = self._by_length[sequence_length] = count_flops(self._model, sequence_length)
            self.source = "counter"
        except FlopsUnknownError as reason:
            self.reason = f"{self.reason.removesuffix(' count_flops counts it instead.')} {reason}"

    def per_token(self, sequence_length: int, *, causal: Causal = "full") -> FlopsPerToken:
        """Return the training FLOPs per token, forward and backward.

        Args:
            sequence_length: S, in tokens; of packed documents that do not attend to one another, their
                length.
            causal: "full" counts all keys of a query, or those within its window; "half" those that a causal
                mask leaves; "dense" all of them whatever the window. What was counted is "dense", and "full"
                is taken for the same there, as windows are not known.

        Raises:
            ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
            FlopsUnknownError: The FLOPs cannot be told, with the reason.
        """
        check_causal(causal)
        check_length(sequence_length)
        if self.source == "model":
            return _from_hook(self._model, sequence_length, causal)
        if self._architecture is not None:
            return self._architecture.per_token(sequence_length, causal)
        if self.counted is None:
            raise FlopsUnknownError(self.reason)
        flops = self._as_counted(sequence_length)
        return flops if causal != "half" else halved(flops)

    def _as_counted(self, length: int) -> FlopsPerToken:
        if length in self._by_length or len(self._by_length) < _COUNTED_AS_ASKED:
            return self._counted_at(length)
        below, above = grid_around(length)
        share = (length - below) / (above - below)
        try:
            return between(self._counted_at(below), self._counted_at(above), share)
        except FlopsUnknownError:
            # Beyond what the model takes, though the length itself is not.
            return self._counted_at(length)

    def _counted_at(self, length: int) -> FlopsPerToken:
        if length not in self._by_length:
            self._by_length[length] = count_flops(self._model, length)
        return self._by_length[length].per_token()


_COUNTED_AS_ASKED = 4
"""Lengths that are counted as they are asked for: most runs have no more."""


def flops_per_token_breakdown(
    model: nn.Module, sequence_length: int, *, causal: Causal = "full"
) -> FlopsPerToken:
    """Return the training FLOPs per token of a model, by part and by layer type.

    Where they come from, and what the arguments mean, is said at `ModelFlops`.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
        FlopsUnknownError: The FLOPs cannot be told, with the reason.
    """
    return ModelFlops(model, sequence_length).per_token(sequence_length, causal=causal)


def model_flops_per_token(model: nn.Module, sequence_length: int, *, causal: Causal = "full") -> float | None:
    """Return the training FLOPs per token (forward and backward), or None when they cannot be told.

    Where they come from is said at `ModelFlops`. The reason for a None is logged once as a warning of the
    logger "perf_metrics".

    Args:
        model: The model, on any device, meta included.
        sequence_length: S, in tokens.
        causal: Which keys count for a query; see `ModelFlops.per_token`.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
    """
    try:
        return flops_per_token_breakdown(model, sequence_length, causal=causal).total
    except FlopsUnknownError as reason:
        warn_once(str(reason))
        return None


def _from_hook(model: nn.Module, sequence_length: int, causal: Causal) -> FlopsPerToken:
    owner = type(model).__name__
    answer = getattr(model, "flops_per_token")(sequence_length)  # noqa: B009 - a Module's attribute has no type
    if isinstance(answer, FlopsPerToken):
        return answer if causal != "half" else halved(answer)
    if answer is None:
        raise FlopsUnknownError(
            f"the model FLOPs of {owner} are unknown, because its flops_per_token returned None."
        )
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not 0 < answer < math.inf:
        raise ValueError(
            f"{owner}.flops_per_token returned {answer!r}, but must return a positive number, a "
            "FlopsPerToken, or None when it cannot be told."
        )
    if causal == "half":
        raise FlopsUnknownError(
            f"{owner}.flops_per_token returned one number, so its attention part cannot be halved. Return a "
            'FlopsPerToken from it, or use causal="full".'
        )
    return FlopsPerToken(float(answer), 0.0)


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    _log.warning("%s", message)


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
