"""Counting what a model computes in one training step, without computing it."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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
            did not keep, and the scores that fused attention computes again.
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
    batch = _row(sequence_length) if inputs is None else _without_values(inputs)
    first = next((value for value in batch.values()), None)
    tokens = 0 if first is None else max(1, first.shape[:2].numel())
    try:
        return _counted(meta_copy(model), batch, tokens)
    except (NotCopiedError, _NotRunError) as reason:
        raise FlopsUnknownError(
            f"FLOPs of {type(model).__name__} cannot be counted on the meta device: {reason}; give the model "
            "a method flops_per_token(sequence_length) that returns its training FLOPs per token"
        ) from None


class _NotRunError(ValueError):
    """The model does not run without values."""


def _row(sequence_length: int | None) -> dict[str, Tensor]:
    import torch

    check_length(sequence_length or 0)
    return {"input_ids": torch.zeros((1, sequence_length or 0), dtype=torch.int64, device="meta")}


def _without_values(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in inputs.items()
    }


def _counted(model: nn.Module, batch: dict[str, Tensor], tokens: int) -> CountedFlops:
    attempts = [lambda: None, *_other_experts(model)]
    problem: Exception | None = None
    for prepare in attempts:
        prepare()
        try:
            return _run(model, batch, tokens)
        except Exception as error:  # noqa: BLE001 - whatever a model does without values, it is told
            problem = problem or error
    text = str(problem).partition("\n")[0][:200] or type(problem).__name__
    raise _NotRunError(text)


def _other_experts(model: nn.Module) -> list[Callable[[], None]]:
    """Ways to run experts without values: which ones are used must not change what is called."""
    switch = getattr(model, "set_experts_implementation", None)
    return [lambda: switch("batched_mm")] if callable(switch) else []


def _run(model: nn.Module, batch: dict[str, Tensor], tokens: int) -> CountedFlops:
    import torch

    from .operator_watch import CallStack, OperatorWatch

    calls = CallStack(model)
    watch = OperatorWatch(calls)
    drawn = random.getstate()
    try:
        # What the forward makes for itself, such as a mask, has no values either.
        device = torch.device("meta")
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), device, calls, watch:
            outputs = _tensors(_call(model, batch))
            trained = [output for output in outputs if output.requires_grad]
            if trained:
                torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])
    finally:
        random.setstate(drawn)
    return CountedFlops(tokens, _parts(watch.bookings, tokens))


def _call(model: nn.Module, batch: dict[str, Tensor]) -> object:
    """Call with keywords; a row of tokens goes first where the model has another name for it."""
    taken = inspect.signature(model.forward).parameters.values()
    if set(batch) == {"input_ids"} and not any(
        parameter.name == "input_ids" or parameter.kind is parameter.VAR_KEYWORD for parameter in taken
    ):
        return model(batch["input_ids"])
    return model(**batch)


def _tensors(output: object) -> list[Tensor]:
    """What a loss would be made of: the loss or the logits where a model says so, else what it returns."""
    import torch

    for name in ("loss", "logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return [value]
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return [item for item in output if isinstance(item, torch.Tensor) and item.is_floating_point()]
    return []


def _parts(bookings: Iterable[Booking], tokens: int) -> tuple[CountedPart, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for booking in bookings:
        figures = sums[_kind(booking)]
        for index, amount in enumerate((booking.forward, booking.backward, booking.recomputed)):
            figures[index] += amount / tokens
    return tuple(CountedPart(kind, *sums[kind]) for kind in KINDS if kind in sums)


def _kind(booking: Booking) -> str:
    kind = kind_of(booking.place.path)
    if booking.operator == "attention":
        return ATTENTION_SCORES
    if booking.operator == "convolution":
        return SHORT_CONVOLUTION if kind == STATE_PROJECTIONS else kind
    if booking.place.holds_experts:
        return ROUTED_EXPERTS
    if booking.operator == "batched":
        return STATE_SCAN if kind == STATE_PROJECTIONS else ATTENTION_SCORES
    return kind
