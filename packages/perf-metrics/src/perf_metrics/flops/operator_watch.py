"""Runs one step of a copy of a model and records the FLOPs of each operator by module."""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Shape: TypeAlias = tuple[int, ...]
Formula: TypeAlias = Callable[..., float]

FUSED_BACKWARD = 2.5
"""Backward of fused attention over its forward: five products for two, as the scores are computed again."""

SCORES_AGAIN = 0.5
"""The part of that which is recomputation."""


@cache
def formulas() -> Mapping[object, Formula]:
    """FLOPs by operator (an `OpOverloadPacket`), for inputs and outputs as they are called."""
    from torch.utils.flop_counter import flop_registry

    return {**flop_registry, **_missing()}


@cache
def attention_operators() -> frozenset[object]:
    """Fused attention, forward and backward."""
    named = (name for name in formulas() if "attention" in str(name))
    return frozenset(named)


@cache
def is_backward_of_attention(operator: object) -> bool:
    """Whether an operator is the backward of fused attention, scores computed again included."""
    return operator in attention_operators() and "backward" in str(operator)


def _missing() -> dict[object, Formula]:
    aten = torch.ops.aten
    known: dict[str, Formula] = {
        # torch 2.13 counts nothing for the CPU's kernel, and refuses fewer key heads than query heads.
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_grouped_mm": _grouped,
        "_scaled_grouped_mm": _grouped,
        # torch 2.13 forgets the groups in the backward of a convolution.
        "convolution_backward": _convolution_backward,
    }
    return {
        getattr(aten, name): _of_shapes(formula) for name, formula in known.items() if hasattr(aten, name)
    }


def _of_shapes(formula: Callable[..., float]) -> Formula:
    @wraps(formula)
    def count(*args: object, out_val: object = None, **_: object) -> float:
        return formula(*(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args))

    return count


def _attention(query: Shape, key: Shape, value: Shape, *_: object) -> float:
    """[batch, heads, queries, size] and two more; keys and values may have fewer heads."""
    batch, heads, queries, size = query
    return 2.0 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object) -> float:
    return FUSED_BACKWARD * _attention(query, key, value)


def _grouped(left: Shape, right: Shape, *_: object) -> float:
    """Products of groups of rows, or of groups of columns: each row of the left is used once."""
    if len(left) == 2 and len(right) == 2:
        return 2.0 * left[0] * left[1] * right[1]
    return 2.0 * prod(left) * right[-1]


def _convolution_backward(
    grad: Shape,
    source: Shape,
    weight: Shape,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    output_mask: tuple[bool, ...],
    *_: object,
) -> float:
    places = prod((source if transposed else grad)[2:])
    forward = 2.0 * grad[0] * places * prod(weight)
    return forward * sum(output_mask[:2])


class _Results:
    """What operators return where tensors have no values: shape, strides and type.

    Torch finds these out in Python for many operators, a norm takes it milliseconds, and the layers of a
    model are alike: what was called with the same shapes before is not asked again.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[tuple[Shape, Shape, torch.dtype], ...]] = {}
        self._makes_new: dict[object, bool] = {}

    def of(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return what an operator would return."""
        try:
            call = (func, _described(args), _described(tuple(kwargs.items())))
            known = self._known.get(call)
        except TypeError:  # an argument without a hash
            return func(*args, **kwargs)
        if known is not None:
            made = [torch.empty_strided(*each, dtype=dtype, device="meta") for *each, dtype in known]
            return tuple(made) if len(made) > 1 else made[0]
        result = func(*args, **kwargs)
        if self._returns_new_tensors(func):
            found = result if isinstance(result, tuple) else (result,)
            if all(type(each) is Tensor and each.is_meta and each.layout is torch.strided for each in found):
                self._known[call] = tuple((each.shape, each.stride(), each.dtype) for each in found)
        return result

    def _returns_new_tensors(self, func: torch._ops.OpOverload) -> bool:
        """Whether an operator of torch changes no argument, and returns tensors that are views of none."""
        if func not in self._makes_new:
            # Private in torch 2.11 to 2.13: an operator's schema, which tells what it changes and returns.
            values = (*func._schema.arguments, *func._schema.returns)
            self._makes_new[func] = func.namespace == "aten" and all(not each.alias_info for each in values)
        return self._makes_new[func]


def _described(value: object) -> object:
    """Of an argument, what a result without values depends on."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return type(value), value.shape, strides, value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(_described(each) for each in value)
    return type(value), value


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
class OpRecord:
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


class OperatorWatch(TorchDispatchMode):
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
        self._results = _Results()
        self._undivided: set[object] = {torch.ops.prim.device.default}
        self._foreign = {id(tensor) for tensor in held}
        self._last_node = -1
        self._makers: dict[int, Place] = {}
        self._records: dict[tuple[Place, Sort], OpRecord] = {}

    @property
    def records(self) -> list[OpRecord]:
        """What was counted."""
        return list(self._records.values())

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the operator, and record it if it has a formula."""
        if self._is_copy:
            self._refuse_foreign(args)
        kwargs = kwargs or {}
        operator = getattr(func, "overloadpacket", func)
        formula = formulas().get(operator)
        if formula is None and (parts := self._decomposed(func, args, kwargs)) is not NotImplemented:
            return parts
        result = self._results.of(func, args, kwargs) if self._is_copy else func(*args, **kwargs)
        if formula is not None:
            self._add(operator, formula(*args, **kwargs, out_val=result))
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
        """What operators made of others come to, those others being recorded."""
        if func in self._undivided or not isinstance(func, torch._ops.OpOverload):
            return NotImplemented
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is NotImplemented:
            self._undivided.add(func)
        return parts

    def _add(self, operator: object, flops: float) -> None:
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():
            place = self._calls.innermost
            # The node of this operator, where it gets one, has been made already.
            newest = torch._C._autograd._get_sequence_nr() - 1
            if newest > self._last_node:
                self._makers[newest] = place
                self._last_node = newest
            record = self._record(place, operator)
            if node is None:
                record.forward += flops
            else:
                record.recomputed += flops
            return
        record = self._record(self._makers.get(node._sequence_nr(), self._calls.innermost), operator)
        again = flops * SCORES_AGAIN / FUSED_BACKWARD if is_backward_of_attention(operator) else 0.0
        record.backward += flops - again
        record.recomputed += again

    def _record(self, place: Place, operator: object) -> OpRecord:
        sort = _sort(operator)
        return self._records.setdefault((place, sort), OpRecord(place, sort))


@cache
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


class NotRunError(ValueError):
    """The model does not run without values."""


def run_step(model: nn.Module, batch: Mapping[str, Tensor], original: nn.Module) -> list[OpRecord]:
    """Run forward and backward, and return what was computed.

    Where a model looks at values, it is tried in other ways: with a mask of its own, so that it does not
    look for packed documents, and with experts that are all called alike.

    Args:
        model: The copy on the meta device.
        batch: Keyword arguments, on the meta device.
        original: The model that was copied, whose tensors must not be met.

    Raises:
        NotRunError: It does not run in any way, with the reason of the first.
    """
    problem: Exception | None = None
    for prepare in _attempts(model, batch):
        try:
            return _run(model, prepare(), original)
        except Exception as error:  # noqa: BLE001 - whatever a model does without values, it is told
            problem = problem or error
    text = str(problem).partition("\n")[0][:200] or type(problem).__name__
    raise NotRunError(text)


def _attempts(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Callable[[], Mapping[str, Tensor]]]:
    """Ways to call a model; each gives the arguments when it is to be tried."""
    masked = _with_mask(model, batch)
    ways = [batch] if masked is None else [batch, masked]
    for arguments in ways:

        def unchanged(arguments: Mapping[str, Tensor] = arguments) -> Mapping[str, Tensor]:
            return arguments

        yield unchanged
    switch = getattr(model, "set_experts_implementation", None)
    if callable(switch):
        for arguments in ways:

            def prepared(arguments: Mapping[str, Tensor] = arguments) -> Mapping[str, Tensor]:
                # Which experts are used must not change what is called.
                switch("batched_mm")
                return arguments

            yield prepared


def _with_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The arguments with a mask that is used as it is; None if the model takes none."""
    tokens = batch.get("input_ids")
    if tokens is None or "attention_mask" in batch or not _takes(model, "attention_mask"):
        return None
    length = tokens.shape[-1]
    return {**batch, "attention_mask": torch.zeros((tokens.shape[0], 1, length, length), device="meta")}


def _takes(model: nn.Module, name: str) -> bool:
    taken = inspect.signature(model.forward).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in taken)


def _run(model: nn.Module, batch: Mapping[str, Tensor], original: nn.Module) -> list[OpRecord]:
    calls = CallStack(model)
    watch = OperatorWatch(calls, original)
    with ExitStack() as stack:
        stack.enter_context(_generators_put_back())
        stack.enter_context(torch.enable_grad())
        # What the forward makes for itself, such as a mask, has no values either.
        stack.enter_context(torch.device("meta"))
        stack.enter_context(calls)
        stack.enter_context(watch)
        outputs = [output for output in _tensors(_call(model, batch)) if output.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        elif any(parameter.requires_grad for parameter in model.parameters()):
            raise NotRunError("nothing that it returns depends on its trained parameters")
    return watch.records


@contextmanager
def _generators_put_back() -> Iterator[None]:
    drawn, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _call(model: nn.Module, batch: Mapping[str, Tensor]) -> object:
    """Call with keywords; a row of tokens goes first where the model has another name for it."""
    if "input_ids" in batch and not _takes(model, "input_ids"):
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        return model(batch["input_ids"], **rest)
    return model(**batch)


def _tensors(output: object) -> list[Tensor]:
    """What a loss would be made of: the loss or the logits where a model says so, else what it returns."""
    for name in ("loss", "logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return [value]
    return list(_leaves(output))


def _leaves(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _leaves(getattr(output, field.name))
