"""How activations change from one layout to another around divided layers, and what that does to gradients.

By `torch.distributed.tensor`, whose redistributions carry their gradients. A layout of a gradient is not
that of its tensor: where every rank computes with its own features, each has a part of the gradient of what
they all were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .draws import Draws

SEQUENCE_DIM = 1
"""Activations are [batch, sequence, features]."""
P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which has no types."""
    disabled: Callable[P, R] = torch.compiler.disable(function)
    return disabled


def with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor on each rank; its gradient, of which each rank has a part, is summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh, to: Placement) -> Tensor:
    """Sum a tensor of which each rank has a part, and leave it whole or divided; no sum in backward."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[to]).to_local()


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part of a tensor that is whole on each; the gradient is gathered."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(dim % x.ndim)]).to_local()


def gathered(x: Tensor, mesh: DeviceMesh, dim: int, size: int, *, partial_gradient: bool = False) -> Tensor:
    """The whole of a tensor that is divided over the ranks.

    Args:
        x: This rank's part.
        mesh: The ranks.
        dim: The dimension that is divided.
        size: Its whole size.
        partial_gradient: Whether each rank has a part of the gradient, so that it must be summed. If not, all
            ranks have the whole gradient, and each takes its part.
    """
    gradient: Placement = Partial() if partial_gradient else Replicate()
    whole = as_sharded(x, mesh, dim, size).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[gradient])


def as_sharded(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> DTensor:
    """A DTensor of a local part. Parts may differ in size; the whole is then not a multiple of this one."""
    shape = list(x.shape)
    shape[dim] = size
    stride = torch.empty(shape, device="meta").stride()
    place = [Shard(dim % x.ndim)]
    return DTensor.from_local(x, mesh, place, run_check=False, shape=torch.Size(shape), stride=stride)


class _Unaliased(torch.autograd.Function):
    """The same tensor, which autograd takes for one of its own and not for a view, as `to_local` returns.

    What a model returns may be changed in place, and `fully_shard` could not follow that of a view.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


# torch leaves `apply` without types; here and elsewhere a name of its own has those of the forward.
unaliased: Callable[[Tensor], Tensor] = _Unaliased.apply


class _GatheredContext(FunctionCtx):
    mesh: DeviceMesh


class _GatheredAgain(torch.autograd.Function):
    """A sequence that was gathered already, once more, for layers whose gradients are parts of a sum.

    A module with colwise layers gathers its input once. What else it does with that input has the whole
    gradient on each rank, and goes through the gathering itself. What the colwise layers send back comes
    here, where it takes one reduce-scatter instead of an all-reduce for each of them.
    """

    @staticmethod
    def forward(ctx: _GatheredContext, part: Tensor, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatheredContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return summed(gradient, ctx.mesh, Shard(SEQUENCE_DIM)), None, None


gathered_again: Callable[[Tensor, Tensor, DeviceMesh], Tensor] = _GatheredAgain.apply


@dataclass(eq=False)
class Scope:
    """The input that the colwise layers of one module share during its forward pass.

    Its gradient is summed once for all of them, and not once for each.

    In the first pass with gradients the graph is checked. Between colwise and rowwise layers each rank
    computes with its own features, so that gradients there are parts of a sum. Whatever else comes in there,
    from an input of the module or a parameter that is whole, would have a part for its gradient that nobody
    adds up; and a gradient that is whole must not be summed over the ranks.
    """

    draws: Draws
    name: str = ""
    inside: bool = False
    """Whether the module itself is called, and not a part of it, as activation checkpointing may do."""
    drew: bool = False
    """Whether random numbers were drawn between its colwise and rowwise layers."""
    source: Tensor | None = None
    entered: Tensor | None = None
    checked: bool = False
    checking: bool = False
    whole: dict[object, str] = field(default_factory=dict)
    """Nodes of the graph whose gradient is whole: inputs of the module ("") and parameters, by module."""
    summed: dict[object, str] = field(default_factory=dict)
    """Those of parameters whose gradient is summed over the ranks, by module."""
    entries: list[object] = field(default_factory=list)
    exits: list[object] = field(default_factory=list)
    """What rowwise layers have divided by the sequence."""
    around: Scope | None = None
    """That of a module around this one: what enters here enters there, too."""
    seen: set[object] = field(default_factory=set)

    def begin(self, *given: object) -> None:
        """Note what the module is given."""
        self.inside = True
        self.checking = not self.checked and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if self.checking:
            self.whole = {each.grad_fn: "" for each in _tensors(given) if each.grad_fn is not None}

    def enter(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """The input of a colwise layer, whose gradient each rank has a part of."""
        self.check_whole(self.inside)
        if self.entered is None or x is not self.source:
            self.source, self.entered = x, with_summed_gradient(x, mesh)
        scope: Scope | None = self
        while scope is not None:
            if scope.checking:
                scope.entries.append(self.entered.grad_fn)
            scope = scope.around
        return self.entered

    def note(self, name: str, module: nn.Module, summed: bool) -> None:
        """Note the local parameters of a module inside, which is whole on each rank."""
        if self.checking:
            nodes = [each.grad_fn for each in module._parameters.values() if each is not None]
            (self.summed if summed else self.whole).update({node: name for node in nodes if node is not None})

    def draw_apart(self, x: Tensor) -> None:
        """From the outputs of a colwise layer on, draw from this rank's own stream."""
        if self.inside:
            self.draws.begin(x)

    def draw_alike(self) -> None:
        """Draw from the common stream again: the outputs of a rowwise layer are whole."""
        self.drew = self.draws.end() or self.drew

    def check_whole(self, is_whole: bool) -> None:
        """Refuse a part that is called by itself, if masks in it would be others than in the whole.

        Raises:
            RuntimeError: Naming the module.
        """
        if self.drew and not is_whole:
            raise RuntimeError(
                f"A part of a layer, with {self.name} or in it, was called by itself. Where that is a "
                "recomputation, random numbers such as masks of dropout would be others than in the forward "
                "pass. Checkpoint the activations of whole layers, or set dropout to 0."
            )

    def leave(self, x: Tensor) -> None:
        """Check the input of a rowwise layer.

        Raises:
            RuntimeError: Something whole went into it, and not through a colwise layer.
        """
        if not self.checking or x.grad_fn is None:
            return
        entries, left = set(self.entries), [x.grad_fn]
        while left:
            node = left.pop()
            if node in self.seen or node in entries:
                continue
            if node in self.whole:
                raise RuntimeError(self._wrong(self.whole[node]))
            self.seen.add(node)
            left += [each for each, _ in node.next_functions if each is not None]
        self.checked = True

    def exit(self, y: Tensor) -> None:
        """Note what a rowwise layer has computed, if that is divided by the sequence."""
        if self.checking:
            self.exits.append(y.grad_fn)

    def end(self, result: object) -> None:
        """Check what no rowwise layer was given, after all of them.

        Raises:
            RuntimeError: A gradient would be summed that is whole on each rank, or is a part of a sum.
        """
        if not self.checking or not self.checked:
            return
        behind = self._behind(result)
        for node, name in self.whole.items():
            if name and node in behind:
                self.checked = False
                raise RuntimeError(
                    f"The module {name} works on what the rowwise layers of {self.name} have divided by the "
                    "sequence, so that its gradient is a part of a sum. Use 'sequence' for it in the plan."
                )
        for node, name in self.summed.items():
            if node not in self.seen and node not in behind:
                self.checked = False
                raise RuntimeError(
                    f"The module {name} does not work on what the colwise layers of {self.name} compute on "
                    "each rank, so that its gradient is whole, and would be summed. Use 'replicate' for it "
                    "in the plan."
                )

    def _behind(self, result: object) -> set[object]:
        """Nodes of the graph between the exits and what the module returns."""
        known = {None, *self.entries, *self.exits, *(node for node, name in self.whole.items() if not name)}
        behind: set[object] = set()
        left = [each.grad_fn for each in _tensors(result)] if self.exits else []
        while left:
            node = left.pop()
            if node is None or node in known or node in behind:
                continue
            behind.add(node)
            left += [each for each, _ in node.next_functions]
        return behind

    def _wrong(self, module: str) -> str:
        if module:
            return (
                f"The module {module} works on what the colwise layers of {self.name} compute on each rank, "
                "so that its gradient is a part of a sum. Use 'replicated_with_grad_allreduce' for it in "
                "the plan."
            )
        return (
            f"The module {self.name} uses its input beside its colwise layers, together with what they "
            "compute on each rank, so that its gradient would be wrong. Leave the layers of this module out "
            "of the plan, which keeps it whole on each rank."
        )

    def clear(self) -> None:
        """Hold no activation any longer."""
        self.draw_alike()
        self.inside = False
        self.source = self.entered = None
        self.checking = False
        self.whole, self.summed, self.seen = {}, {}, set()
        self.entries, self.exits = [], []


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
