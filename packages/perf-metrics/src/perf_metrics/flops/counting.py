"""Counts the FLOPs of one training step of any module, on a copy without values."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .architecture import (
    ATTENTION_SCORES,
    KINDS,
    ROUTED_EXPERTS,
    SHORT_CONVOLUTION,
    STATE_PROJECTIONS,
    STATE_SCAN,
    FlopsPart,
    FlopsPerToken,
    FlopsUnknownError,
    check_length,
    kind_of,
    per_token_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .operator_watch import OpRecord


class NotCopiedError(ValueError):
    """A part of the model cannot be copied; the message names it."""


def meta_copy(model: nn.Module) -> nn.Module:
    """Return the model with its parameters and buffers on the meta device.

    No memory for weights is needed, whatever the model's size. Sharded tensors become whole. Hooks are left
    out, compiled modules are as they were written, modes and `requires_grad` are kept.

    What compiles a module, or adds up gradients of ranks, is left out. An attribute that cannot be copied,
    such as a lock or an open file, is shared with the original.

    Args:
        model: The model, which stays as it is.

    Raises:
        NotCopiedError: It is not a module.
    """
    from torch import nn

    modules = list(model.modules())
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_bare_tensors(modules)):
        memo.setdefault(id(tensor), _fake_tensor(tensor))
    for module in modules:
        # Made beforehand, so that hooks and what forbids copying (a sharded module does) are not met.
        bare: nn.Module = object.__new__(_written_class(module))
        memo[id(module)] = bare
    for module in reversed(modules):
        if (inner := _wrapped(module)) is not None:
            memo[id(module)] = memo[id(inner)]
    plain = nn.Module()
    hooks = {
        name for name, value in plain.__dict__.items() if isinstance(value, OrderedDict) and "hook" in name
    }
    for module in modules:
        if _wrapped(module) is None:
            clone = memo[id(module)]
            clone.__dict__.update({name: _copied(value, memo) for name, value in _state(module, hooks)})
            clone.__dict__.update({name: OrderedDict() for name in hooks})
    result = memo[id(model)]
    if not isinstance(result, nn.Module):
        raise NotCopiedError(f"{type(model).__name__} is not a module")
    return result


def _state(module: nn.Module, hooks: set[str]) -> Iterator[tuple[str, object]]:
    """What makes the module what it is; not what others have hung on it."""
    for name, value in vars(module).items():
        # Sharding keeps process groups there.
        if name not in hooks and not name.startswith("__composable_api_state"):
            yield name, None if name == "_compiled_call_impl" else value


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module within one that only compiles it, or adds up gradients of ranks."""
    inner = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}.get(type(module).__name__)
    return None if inner is None else module._modules.get(inner)


def _copied(value: object, memo: dict[int, object]) -> object:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - locks, files, loggers: what cannot be copied is shared
        return value


def _written_class(module: nn.Module) -> type:
    """The class that the author wrote, where sharding has put another one on top of it."""
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__[1:3]):
        return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind.__mro__[1]
    return kind


def _bare_tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes."""
    import torch

    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _fake_tensor(tensor: Tensor) -> Tensor:
    import torch
    from torch import nn

    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


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
    model: nn.Module, sequence_length: int | None = None, *, inputs: Mapping[str, Tensor] | None = None
) -> CountedFlops:
    """Count the FLOPs of one training step of this very model, by torch's formulas for its operators.

    A copy without values is run on the meta device, forward and backward; nothing is computed, and the model
    stays as it is. Each operator is recorded for the module that called it; its backward is found by the
    autograd node. Beside torch's own formulas there are some for what torch leaves out: attention on the CPU,
    grouped products of experts, the groups of a convolution's backward.

    What runs as one kernel that torch has no formula for (Triton, custom operators) is not seen, nor are
    sums that are not a matrix product. Masked scores count in full, as in "dense".

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
        raise ValueError("count_flops needs either sequence_length or inputs.")
    import torch

    from .operator_watch import NotRunError, run_step

    try:
        # What is made in inference mode can have no gradient.
        with torch.inference_mode(False):
            batch = _row(sequence_length) if inputs is None else _fake_inputs(inputs)
            first = next((value for value in batch.values()), None)
            tokens = 0 if first is None else max(1, first.shape[:2].numel())
            return CountedFlops(tokens, _parts(run_step(meta_copy(model), batch, model), tokens))
    except (NotCopiedError, NotRunError) as reason:
        raise FlopsUnknownError(
            f"FLOPs of {type(model).__name__} cannot be counted on the meta device: {reason}. Give the "
            "model a method flops_per_token(sequence_length) that returns its training FLOPs per token."
        ) from None


def _row(sequence_length: int | None) -> dict[str, Tensor]:
    import torch

    check_length(sequence_length or 0)
    return {"input_ids": torch.zeros((1, sequence_length or 0), dtype=torch.int64, device="meta")}


def _fake_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in inputs.items()
    }


def _parts(records: Iterable[OpRecord], tokens: int) -> tuple[CountedPart, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for record in records:
        figures = sums[_kind(record)]
        for index, amount in enumerate((record.forward, record.backward, record.recomputed)):
            figures[index] += amount / tokens
    return tuple(CountedPart(kind, *sums[kind]) for kind in KINDS if kind in sums)


def _kind(record: OpRecord) -> str:
    place = record.place
    kind = kind_of(place.path)
    if record.operator == "attention":
        return ATTENTION_SCORES
    if record.operator == "convolution":
        return SHORT_CONVOLUTION if kind == STATE_PROJECTIONS else kind
    if place.holds_experts:
        return ROUTED_EXPERTS
    if record.operator == "batched":
        return STATE_SCAN if kind == STATE_PROJECTIONS and not place.attends else ATTENTION_SCORES
    return kind
