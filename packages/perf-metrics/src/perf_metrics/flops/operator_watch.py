"""Books every operator that a model calls on the module that called it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .op_formulas import FUSED_BACKWARD, SCORES_AGAIN, attention_operators, formulas, is_backward_of_attention

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

Sort: TypeAlias = Literal["attention", "batched", "convolution", "product"]


class ForeignTensorError(ValueError):
    """An operator was given a tensor with values."""


@dataclass(frozen=True)
class Place:
    """A module: its path, whether it multiplies by its own stack of matrices, and whether it is attention."""

    path: str
    holds_experts: bool
    attends: bool


def _place(path: str, module: nn.Module) -> Place:
    name = type(module).__name__.lower()
    return Place(path, _holds_experts(module), "attention" in name and "linear" not in name)


@dataclass
class Booking:
    """FLOPs of one sort of operator in one module, of all its calls."""

    place: Place
    operator: Sort
    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0


class CallStack:
    """While it is entered, knows which module of a model is being called.

    Args:
        model: The model. It gets hooks, which are taken away at the exit.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open = [_place("", model)]
        self._handles: list[RemovableHandle] = []

    @property
    def innermost(self) -> Place:
        """The module that was called last and has not returned."""
        return self._open[-1]

    def __enter__(self) -> CallStack:
        for path, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._entering(_place(path, module))),
                module.register_forward_hook(self._leaving, always_call=True),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, place: Place) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append(place)

        return enter

    def _leaving(self, *_: object) -> None:
        self._open.pop()


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts what the modules of a model compute.

    An operator of the backward pass belongs to the module whose forward made its autograd node: nodes are
    numbered when they are made. One that runs in the backward pass with gradients switched on is part of a
    forward pass done again.

    Args:
        calls: Tells which module is being called.
        original: The model of which this one is a copy without values. A forward that was exchanged by a
            function may still hold it; what it computes must not reach its gradients. None: no copy is run.
    """

    def __init__(self, calls: CallStack, original: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        held = () if original is None else (*original.parameters(), *original.buffers())
        self._is_copy = original is not None
        self._foreign = {id(tensor) for tensor in held}
        self._last_node = -1
        self._makers: dict[int, Place] = {}
        self._booked: dict[tuple[Place, Sort], Booking] = {}

    @property
    def bookings(self) -> list[Booking]:
        """What was counted."""
        return list(self._booked.values())

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the operator, and book it if it has a formula."""
        if self._is_copy:
            self._refuse_foreign(args)
        operator = getattr(func, "overloadpacket", func)
        formula = formulas().get(operator)
        if formula is None:
            if (parts := self._decomposed(func, args, kwargs or {})) is not NotImplemented:
                return parts
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._book(operator, formula(*args, **(kwargs or {}), out_val=result))
        return result

    def _refuse_foreign(self, args: Iterable[object]) -> None:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if id(arg) in self._foreign or (arg.dim() and arg.device.type != "meta"):
                    raise ForeignTensorError(
                        f"{self._calls.innermost.path or 'its forward'} works on a tensor that is not part "
                        "of the copy; a forward that was exchanged by a function holds the original"
                    )
            elif isinstance(arg, list | tuple):
                self._refuse_foreign(arg)

    def _decomposed(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """What operators made of others come to, those others being booked."""
        if not isinstance(func, torch._ops.OpOverload) or func is torch.ops.prim.device.default:
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def _book(self, operator: object, flops: float) -> None:
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():
            place = self._calls.innermost
            # The node of this operator, where it gets one, has been made already.
            newest = torch._C._autograd._get_sequence_nr() - 1
            if newest > self._last_node:
                self._makers[newest] = place
                self._last_node = newest
            booking = self._booking(place, operator)
            if node is None:
                booking.forward += flops
            else:
                booking.recomputed += flops
            return
        booking = self._booking(self._makers.get(node._sequence_nr(), self._calls.innermost), operator)
        again = flops * SCORES_AGAIN / FUSED_BACKWARD if is_backward_of_attention(operator) else 0.0
        booking.backward += flops - again
        booking.recomputed += again

    def _booking(self, place: Place, operator: object) -> Booking:
        sort = _sort(operator)
        return self._booked.setdefault((place, sort), Booking(place, sort))


def _sort(operator: object) -> Sort:
    aten = torch.ops.aten
    if operator in attention_operators():
        return "attention"
    if operator in (aten.bmm, aten.baddbmm):
        return "batched"
    return "convolution" if "convolution" in str(operator) else "product"


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module multiplies by its own stack of matrices."""
    own: Iterator[nn.Parameter] = module.parameters(recurse=False)
    return any(parameter.dim() == 3 for parameter in own) and not isinstance(
        module, torch.nn.Conv1d | torch.nn.ConvTranspose1d
    )
