"""What each style does to a module: how its parameters are placed, and what travels around its forward pass.

A module computes with its own forward on local tensors. Only at its border does an activation change from one
layout to another, by `torch.distributed.tensor`, whose redistributions carry their gradients. The gradient of
every parameter comes out with the placement of the parameter: nothing is left Partial, so that any optimizer
and any norm can work on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .activations import (
    SEQUENCE_DIM,
    Scope,
    as_sharded,
    gathered,
    gathered_again,
    split,
    summed,
    unaliased,
    with_summed_gradient,
)
from .attention import can_look_at
from .draws import Draws

Call = Callable[..., Any]


@contextmanager
def local_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    sum_gradients: bool = False,
    rows: Tensor | slice | None = None,
    without: tuple[str, ...] = (),
) -> Iterator[None]:
    """Let a module compute with what this rank holds of its own parameters.

    Args:
        module: Its parameters are DTensors on `mesh`.
        mesh: The ranks.
        sum_gradients: Whether the gradient of a whole parameter is a sum over the ranks.
        rows: Which rows of whole parameters this rank uses.
        without: Parameters to leave out.
    """
    # nn.Module keeps parameters in this table; torch.func.functional_call swaps them in the same way.
    kept = dict(module._parameters)
    try:
        for name, parameter in kept.items():
            if parameter is None:
                continue
            value: Tensor | None = None
            if name not in without:
                value = local_value(parameter, mesh, sum_gradients=sum_gradients)
                value = value if rows is None else value[rows]
            module._parameters[name] = cast(nn.Parameter, value)
        yield
    finally:
        module._parameters.update(kept)


def local_value(parameter: Tensor, mesh: DeviceMesh, *, sum_gradients: bool = False) -> Tensor:
    """What this rank holds of a parameter; its gradient has the parameter's placement.

    Raises:
        RuntimeError: `fully_shard` has divided it, too, and has not gathered it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim != 1:
        raise RuntimeError(
            "A module was called whose parameters fully_shard has not gathered. Call the module that was "
            "given to fully_shard, and not a part of it, or give that part to fully_shard, too."
        )
    local = local_part(parameter) if _is_uneven(parameter) else parameter.to_local()
    return with_summed_gradient(local, mesh) if sum_gradients else local


def _is_uneven(parameter: DTensor) -> bool:
    """Whether strides that are guessed from this rank's part would not be those of the parameter."""
    (placement,), ranks = parameter.placements, parameter.device_mesh.size()
    return isinstance(placement, Shard) and placement.dim > 0 and parameter.shape[placement.dim] % ranks != 0


class _LocalContext(FunctionCtx):
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class _LocalPart(torch.autograd.Function):
    """This rank's columns of a parameter, where the ranks have unequal numbers of them.

    `to_local` guesses the strides of the gradient, as if they had equal ones. Then autograd copies it, and in
    torch 2.11 the copy is the whole gradient, on each rank.
    """

    @staticmethod
    def forward(ctx: _LocalContext, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        return parameter.to_local().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: _LocalContext, gradient: Tensor) -> Tensor:
        placed = (ctx.mesh, ctx.placements)
        return DTensor.from_local(gradient, *placed, run_check=False, shape=ctx.shape, stride=ctx.stride)


local_part: Callable[[DTensor], Tensor] = _LocalPart.apply


@dataclass(eq=False)
class Style(ABC):
    """How a module is divided. It has no state of its own beyond a forward pass.

    Attributes:
        mesh: The ranks, one dimension.
        sequence: Whether activations between the modules are divided by the sequence.
    """

    mesh: DeviceMesh
    sequence: bool = False

    def placement(self, name: str) -> Placement:
        """Where a parameter of the module lives."""
        return Replicate()

    @abstractmethod
    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module by `call`, its own forward."""

    def __deepcopy__(self, memo: object) -> Style:
        return self  # process groups cannot be copied, and a copy of the model uses the same ranks


@dataclass(eq=False)
class Colwise(Style):
    """A linear layer divided by its outputs.

    Attributes:
        output: "local", "gathered", or "logits": a DTensor divided by the last dimension.
        scope: Of the module around it; None where its input is its own affair, as for an output head.
        rows: Where the parameters are whole: the rows that this rank uses, such as those of a key-value head
            that several ranks share. Their gradients are summed.
        width: How many outputs all ranks have together.
    """

    output: str = "local"
    scope: Scope | None = None
    rows: Tensor | slice | None = None
    width: int = field(kw_only=True)

    def placement(self, name: str) -> Placement:
        """By rows, unless all of them are everywhere."""
        return Shard(0) if self.rows is None else Replicate()

    def enter(self, x: Tensor) -> Tensor:
        """The whole input, whose gradient is summed."""
        if self.scope is not None:
            return self.scope.enter(x, self.mesh)
        if self.sequence:
            size = x.shape[SEQUENCE_DIM] * self.mesh.size()
            return gathered(x, self.mesh, SEQUENCE_DIM, size, partial_gradient=True)
        return with_summed_gradient(x, self.mesh)

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute this rank's outputs, and gather them if asked."""
        x, args, kwargs = take_stream(module, args, kwargs)
        with local_parameters(module, self.mesh, sum_gradients=self.rows is not None, rows=self.rows):
            y: Tensor = call(self.enter(x), *args, **kwargs)
        if self.scope is not None and self.output == "local" and module.training:
            self.scope.draw_apart(y)
        if self.output == "gathered":
            return unaliased(gathered(y, self.mesh, -1, self.width))
        return as_sharded(y, self.mesh, -1, self.width) if self.output == "logits" else y


@dataclass(eq=False)
class Rowwise(Style):
    """A linear layer divided by its inputs; what the ranks compute is summed.

    Attributes:
        split_input: Whether the input is whole on each rank.
        scope: Of the module around it.
    """

    split_input: bool = False
    scope: Scope | None = None

    def placement(self, name: str) -> Placement:
        """By columns; a bias is added once, to the sum."""
        return Shard(1) if name == "weight" else Replicate()

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute this rank's part of the outputs, and sum them."""
        x, args, kwargs = take_stream(module, args, kwargs)
        if self.split_input:
            x = split(x, self.mesh, -1)
        elif self.scope is not None:
            self.scope.leave(x)
        with local_parameters(module, self.mesh, without=("bias",)):
            y: Tensor = call(x, *args, **kwargs)
        if self.scope is not None and not self.sequence:
            self.scope.draw_alike()
        y = summed(y, self.mesh, Shard(SEQUENCE_DIM) if self.sequence else Replicate())
        bias = module._parameters.get("bias")
        if bias is not None:
            y = y + local_value(bias, self.mesh, sum_gradients=self.sequence).to(y.dtype)
        if self.scope is not None and self.sequence:
            self.scope.exit(y)
        return y


@dataclass(eq=False)
class Vocabulary(Style):
    """An embedding divided by its rows.

    Attributes:
        first: The first row of this rank.
        count: How many rows it has.
        size: How many all ranks have together.
    """

    first: int = field(kw_only=True)
    count: int = field(kw_only=True)
    size: int = field(kw_only=True)

    def placement(self, name: str) -> Placement:
        """By rows."""
        return Shard(0)

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look up this rank's tokens, and sum over the ranks."""
        ids, args, kwargs = take_stream(module, args, kwargs)
        # Each rank would take such a token for one of another rank, and its embedding would be 0.
        outside = (ids < 0) | (ids >= self.size)
        looked = can_look_at(ids)
        if looked and bool(outside.any()):
            raise IndexError(f"A token is outside the vocabulary of {self.size}.")
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.count)
        with local_parameters(module, self.mesh):
            y: Tensor = call(local.masked_fill(elsewhere, 0), *args, **kwargs)
        y = summed(y.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh, Replicate())
        # To look would wait for an accelerator; NaN says it without.
        return y if looked else y.masked_fill(outside.unsqueeze(-1), float("nan"))


@dataclass(eq=False)
class Whole(Style):
    """A module that every rank has the whole of.

    Attributes:
        sum_gradients: Whether each rank's gradient is a part of a sum, as it works on its part of the
            sequence or on its heads.
        progress: Says whether the sequence is divided by now; None inside layers.
        name: Of the module, for the message.
        scope: Of the module around it that has colwise layers.
    """

    sum_gradients: bool = False
    progress: Progress | None = None
    name: str = ""
    scope: Scope | None = None

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute with local tensors."""
        if self.progress is not None:
            self.progress.check(self.name, self.sum_gradients)
        with local_parameters(module, self.mesh, sum_gradients=self.sum_gradients):
            if self.scope is not None:
                self.scope.note(self.name, module, self.sum_gradients)
            return call(*args, **kwargs)


@dataclass(eq=False)
class Region(Style):
    """A module around colwise layers: their shared input is gathered, and its gradient summed, once.

    Attributes:
        scope: What its layers share.
        progress: Says whether the sequence is divided by now.
    """

    scope: Scope = field(kw_only=True)
    progress: Progress | None = None

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on the whole sequence."""
        if self.sequence and module.training:
            self.scope.check_whole(self.scope.draws.is_apart)
        if not self.scope.draws.is_apart:  # compiled code does not get further
            return self._forward(call, args, kwargs, module)
        with self.scope.draws.alike():
            return self._forward(call, args, kwargs, module)

    def _forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> Any:
        if self.sequence and self.progress is not None and self.progress.divided is False:
            # Gathering a sequence that is whole would repeat it as often as there are ranks.
            raise RuntimeError(
                f"The module {self.scope.name} was called before the first layer, where sequence=True "
                "divides the sequence. Call the layers in their order, the first one each time, or set "
                "sequence=False."
            )
        try:
            if self.sequence:
                part, args, kwargs = take_stream(module, args, kwargs)
                size = part.shape[SEQUENCE_DIM] * self.mesh.size()
                whole = gathered(part, self.mesh, SEQUENCE_DIM, size)
                self.scope.source = whole
                self.scope.entered = gathered_again(part, whole.detach(), self.mesh)
                args = (whole, *args)
            self.scope.begin(args, kwargs)
            result = call(*args, **kwargs)
            self.scope.end(result)
            return result
        finally:
            self.scope.clear()


@dataclass(eq=False)
class Progress:
    """How far a forward pass is.

    Attributes:
        stages: Whether layers may be called without the first one, as by a stage of a pipeline, which is
            given parts of the sequence.
        divided: Whether it has divided the sequence; None outside the module with the layers.
    """

    stages: bool = False
    divided: bool | None = None

    def check(self, name: str, on_parts: bool) -> None:
        """Refuse a module that works on another layout of the sequence than its style says.

        Raises:
            RuntimeError: Its gradient would be wrong.
        """
        if self.divided is None or self.divided == on_parts:
            return
        where, style = ("parts of", "sequence") if self.divided else ("the whole of", "replicate")
        raise RuntimeError(
            f"The module {name} works on {where} the sequence, which its style does not say, so that its "
            f"gradient would be wrong. Add {name!r}: {style!r} to the plan."
        )


@dataclass(eq=False)
class Layers(Style):
    """The module that holds the layers: before the first one the sequence is whole, afterwards divided."""

    progress: Progress = field(default_factory=Progress)

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, knowing where it is."""
        if not self.sequence:
            return call(*args, **kwargs)
        self.progress.divided = False
        try:
            return call(*args, **kwargs)
        finally:
            self.progress.divided = None


@dataclass(eq=False)
class Layer(Style):
    """A layer, which works on parts of the sequence; the first one divides it.

    From stage to stage of a pipeline parts are sent, too: that is a `1 / tensor` of the bytes, and nothing is
    gathered at the end of a stage to be divided again by the next one.
    """

    draws: Draws = field(kw_only=True)
    first: bool = False
    progress: Progress = field(default_factory=Progress)

    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer on this rank's part of the sequence."""
        if self.sequence and not self.first and self.progress.stages and self.progress.divided is False:
            self.progress.divided = True  # the hidden state of another stage came in
        # The first one may come again, in a model that goes through its layers several times.
        if not self.sequence or not self.first or self.progress.divided:
            return self._apart(module, call, args, kwargs)
        x, args, kwargs = take_stream(module, args, kwargs)
        ranks = self.mesh.size()
        if x.ndim != 3 or x.shape[SEQUENCE_DIM] % ranks:
            raise ValueError(
                f"The input of the first layer has the shape {list(x.shape)}, and sequence=True needs "
                f"[batch, sequence, features] with a sequence that is a multiple of tensor={ranks}. Pad the "
                "sequence, or set sequence=False."
            )
        if self.progress.divided is not None:
            self.progress.divided = True
        return self._apart(module, call, (split(x, self.mesh, SEQUENCE_DIM), *args), kwargs)

    def _apart(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer; each rank draws random numbers for its own positions."""
        if not self.sequence or not module.training:
            return call(*args, **kwargs)
        self.draws.begin(take_stream(module, args, kwargs)[0])
        try:
            return call(*args, **kwargs)
        finally:
            self.draws.end()


_STREAM = ("hidden_states", "input", "input_ids", "x")


def take_stream(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The tensor that a module works on, and its other arguments.

    Raises:
        TypeError: There is none, as the first argument or by a usual name.
    """
    rest = dict(kwargs)
    x = args[0] if args else next((rest.pop(name) for name in _STREAM if name in rest), None)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{type(module).__name__} was called without the tensor that it works on. Pass it first, or as "
            f"{' or '.join(_STREAM)}."
        )
    return x, args[1:], rest


class Styled(nn.Module):
    """A module with styles. The class of a module becomes one that has this and its own class as bases.

    As `fully_shard` does: names of modules and parameters stay, `isinstance` too, and whoever replaces the
    forward of the class sees that it is another one.
    """

    _tensor_styles: list[Style]
    _tensor_ties: list[tuple[str, nn.Module, str, str]]
    """For each parameter that another module shares: its name, that module, its name there, and a message."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward within its styles, the last one innermost."""
        check_ties(self)
        call: Call = super().forward
        for style in reversed(self._tensor_styles):
            call = _within(style, self, call)
        return call(*args, **kwargs)


def _within(style: Style, module: nn.Module, call: Call) -> Call:
    def run(*args: Any, **kwargs: Any) -> Any:
        return style.forward(module, call, args, kwargs)

    return run


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def add_style(module: nn.Module, style: Style) -> None:
    """Give a module a style, inside those that it has."""
    cls = type(module)
    if not isinstance(module, Styled):
        if cls not in _CLASSES:
            namespace = {"__module__": cls.__module__}
            _CLASSES[cls] = type(f"TensorParallel{cls.__name__}", (Styled, cls), namespace)
        module.__class__ = _CLASSES[cls]
        vars(module).update(_tensor_styles=[], _tensor_ties=[])
    styles_of(module).append(style)


def styles_of(module: nn.Module) -> list[Style]:
    """The styles of a module, outermost first."""
    return module._tensor_styles if isinstance(module, Styled) else []


def check_ties(module: nn.Module) -> None:
    """Check that parameters that were shared when the model was divided still are.

    Raises:
        RuntimeError: They are not, so that each would be trained by itself.
    """
    if isinstance(module, Styled) and not torch.compiler.is_compiling():
        for name, other, name_there, message in module._tensor_ties:
            here, there = module._parameters.get(name), other._parameters.get(name_there)
            # A stage of a pipeline may have only one of the two.
            if here is not None and there is not None and here is not there:
                raise RuntimeError(message)


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """A context in which no sequence is divided, whatever `sequence` was, to write texts of any length.

    Without gradients only: layers that work on parts of a sequence sum theirs over the ranks.

    Args:
        model: What `shard_tensors` has divided, or a part of it.
    """
    styles = [style for module in model.modules() for style in styles_of(module) if style.sequence]
    for style in styles:
        style.sequence = False
    try:
        with torch.no_grad():
            yield
    finally:
        for style in styles:
            style.sequence = True
