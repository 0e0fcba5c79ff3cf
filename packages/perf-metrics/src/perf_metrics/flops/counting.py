"""Counting what a model computes in one training step, without computing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .accounts import (
    ATTENTION_SCORES,
    KINDS,
    ROUTED_EXPERTS,
    SHORT_CONVOLUTION,
    STATE_PROJECTIONS,
    STATE_SCAN,
    FlopsPart,
    FlopsPerToken,
    FlopsUnknownError,
    per_token_of,
)
from .architecture import check_length
from .layer_kinds import kind_of
from .meta_copy import NotCopiedError, meta_copy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .operator_watch import Booking


@dataclass(frozen=True)
class CountedPart:
    """Counted FLOPs per token of one layer type.

    Attributes:
        kind: The layer type.
        forward: Of the forward pass.
        backward: Of gradients.
        recomputed: Of the backward pass too, but done for the second time: activations that checkpointing
            did not keep. What fused kernels of attention compute again is not among them, as there are none
            on the meta device.
    """

    kind: str
    forward: float
    backward: float
    recomputed: float


@dataclass(frozen=True)
class CountedFlops:
    """FLOPs per token of one training step as torch's operators add up to.

    Attributes:
        tokens: Tokens that were counted.
        parts: By layer type.
    """

    tokens: int
    parts: tuple[CountedPart, ...]

    @property
    def model(self) -> float:
        """Forward and backward, nothing twice: what MFU is about."""
        return sum(part.forward + part.backward for part in self.parts)

    @property
    def hardware(self) -> float:
        """The same with everything that is recomputed: what HFU is about."""
        return self.model + sum(part.recomputed for part in self.parts)

    def recomputed(self, flops: FlopsPerToken) -> float:
        """What is recomputed per token at another sequence length, of which the model FLOPs are given.

        Each layer type recomputes the share of its forward that it did when it was counted.
        """
        if not flops.parts:
            return flops.total * (self.hardware / self.model - 1) if self.model else 0.0
        shares = {part.kind: part.recomputed / part.forward for part in self.parts if part.forward}
        # Rounded, so that it does not matter at which length it was counted.
        return sum(part.forward * round(shares.get(part.kind, 0.0), 6) for part in flops.parts)

    def per_token(self) -> FlopsPerToken:
        """The model FLOPs as the formula gives them."""
        return per_token_of(
            {part.kind: FlopsPart(part.kind, part.forward, part.backward) for part in self.parts}
        )


def count_flops(
    model: nn.Module,
    sequence_length: int | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
) -> CountedFlops:
    """Count the FLOPs of one training step of this very model, by torch's formulas for its operators.

    A copy without values is run on the meta device, forward and backward; nothing is computed, and the model
    stays as it is. Each operator is booked on the module that called it; its backward is found by the
    autograd node. Beside torch's own formulas there are some for what torch leaves out: attention on the CPU,
    grouped products of experts, the groups of a convolution's backward.

    What runs as one kernel that torch has no formula for (Triton, custom operators) is not seen, nor are
    sums that are no matrix product. Masked scores count in full, as in "dense".

    Args:
        model: The model, on any device. It is called in the mode it is in, so checkpointing that is on in
            training is counted if the model is in training mode.
        sequence_length: Tokens of the one row that the model is called with, as `input_ids` where it takes
            an argument of that name, else as its first one.
        inputs: Keyword arguments to call the model with instead; tensors of any device, of which only shape
            and type matter. The first one tells the number of tokens: its first two dimensions.

    Returns:
        FLOPs per token by layer type.

    Raises:
        ValueError: Neither or both of `sequence_length` and `inputs` are given, or it is not positive.
        FlopsUnknownError: The model cannot be run without values, with the reason.
    """
    if (sequence_length is None) == (inputs is None):
        raise ValueError("count_flops needs either sequence_length or inputs")
    import torch

    from .trial_run import NotRunError, run_step

    try:
        # What is made in inference mode can have no gradient.
        with torch.inference_mode(False):
            batch = _row(sequence_length) if inputs is None else _without_values(inputs)
            first = next((value for value in batch.values()), None)
            tokens = 0 if first is None else max(1, first.shape[:2].numel())
            return CountedFlops(tokens, _parts(run_step(meta_copy(model), batch, model), tokens))
    except (NotCopiedError, NotRunError) as reason:
        raise FlopsUnknownError(
            f"FLOPs of {type(model).__name__} cannot be counted on the meta device: {reason}; give the model "
            "a method flops_per_token(sequence_length) that returns its training FLOPs per token"
        ) from None


def _row(sequence_length: int | None) -> dict[str, Tensor]:
    import torch

    check_length(sequence_length or 0)
    return {"input_ids": torch.zeros((1, sequence_length or 0), dtype=torch.int64, device="meta")}


def _without_values(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in inputs.items()
    }


def _parts(bookings: Iterable[Booking], tokens: int) -> tuple[CountedPart, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for booking in bookings:
        figures = sums[_kind(booking)]
        for index, amount in enumerate((booking.forward, booking.backward, booking.recomputed)):
            figures[index] += amount / tokens
    return tuple(CountedPart(kind, *sums[kind]) for kind in KINDS if kind in sums)


def _kind(booking: Booking) -> str:
    place = booking.place
    kind = kind_of(place.path)
    if booking.operator == "attention":
        return ATTENTION_SCORES
    if booking.operator == "convolution":
        return SHORT_CONVOLUTION if kind == STATE_PROJECTIONS else kind
    if place.holds_experts:
        return ROUTED_EXPERTS
    if booking.operator == "batched":
        return STATE_SCAN if kind == STATE_PROJECTIONS and not place.attends else ATTENTION_SCORES
    return kind
