"""Divide experts over the ranks of a mesh: tokens travel to the ranks that hold their experts, and back.

How many tokens a rank sends to another one is decided by the router anew in each pass, so the ranks first
tell each other, and the host waits for these numbers: once in each pass of a layer. No token is dropped,
whatever an expert gets. Weights and gradients of experts need no factor: whoever computes an expert has seen
the tokens of all ranks that share it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from .activations import gathered, not_compiled, split, unaliased
from .plan import PlanError, collapsed
from .same import check_same
from .styles import Call, Style, Styled, add_style, local_parameters


def divide_experts(model: nn.Module, mesh: DeviceMesh, *, same_tokens: DeviceMesh | None = None) -> list[str]:
    """Divide the experts of a model over the ranks of a mesh, in place; collective.

    Each rank holds equally many experts of each layer, in the order of ranks: their parameters become
    DTensors of the same names, divided by the first dimension. Routers and everything else stay as they are.
    Experts are divided first, before `shard_tensors`, `divide_sequences` and `fully_shard`, and the optimizer
    is made afterwards.

    All ranks of the mesh call the model equally often then, for training and evaluation alike. Ranks that
    hold the same experts, `Meshes(...).expert_fsdp`, need the sum of their gradients: give the modules whose
    names are returned to `fully_shard` over that mesh.

    Experts are found as transformers 5 has them: a module with an attribute `num_experts` whose parameters
    have the shape [experts, ...], and that is called with tokens [tokens, hidden], the numbers of the experts
    of each `top_k_index` [tokens, used] and their weights `top_k_weights` [tokens, used]. It returns the sum
    of what these experts make of a token, times the weights.

    Args:
        model: Parameters have values, of which those of the first rank count, or are on the meta device.
        mesh: One dimension, such as `dist_env.Meshes(...).expert`.
        same_tokens: Ranks that all have the same tokens, such as `Meshes(...).tensor`: each of them sends a
            part of its own.

    Returns:
        Names of the modules that were divided.

    Raises:
        PlanError: On every rank of the mesh, before anything is divided: the model has no experts that can be
            divided, or ranks of the mesh have different models.
    """
    if mesh.ndim != 1:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions, and experts are divided over one. Give that one, such as "
            "dist_env.Meshes(layout).expert."
        )
    if same_tokens is not None and same_tokens.ndim != 1:
        raise PlanError(
            f"same_tokens has {same_tokens.ndim} dimensions, and tokens are divided over one. Give that one, "
            "such as dist_env.Meshes(layout).tensor."
        )
    found, error = [], None
    try:
        found = _examined(model, mesh.size())
    except PlanError as raised:
        error = raised
    _check_same(model, found, mesh, same_tokens)
    if error is not None:
        raise error
    for name in found:
        module = model.get_submodule(name)
        here = vars(module)[_COUNT] // mesh.size()
        add_style(module, Dispatched(mesh, same_tokens=same_tokens, here=here))
        for own, parameter in list(module._parameters.items()):
            if parameter is not None:
                source = None if parameter.is_meta else 0
                value = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
                new = nn.Parameter(value, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))
                module._parameters[own] = new
        # Modules loop over it, or count by it, on what they hold.
        vars(module).update({_COUNT: here, "experts_are_divided": True})
    return found


def _examined(model: nn.Module, ranks: int) -> list[str]:
    """The names of modules with experts, if they can be divided over so many ranks.

    Raises:
        PlanError: With every reason why they cannot.
    """
    if any(isinstance(module, Styled) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        raise PlanError(
            "The model is divided already. Divide experts first, and tensors, sequences and weights after it."
        )
    found, problems = [], []
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    for name, module in model.named_modules():
        own = {each: value for each, value in module._parameters.items() if value is not None}
        count = vars(module).get(_COUNT)  # not a property, which could not be set
        if not own or not isinstance(count, int) or not _is_called_with_choice(module):
            continue
        short = collapsed(name) or type(module).__name__
        # What is inside, such as an activation function, may have no values of its own, and buffers are not
        # divided.
        odd = [
            each
            for each, value in (*module.named_parameters(), *module.named_buffers())
            if each not in own or not value.ndim or value.shape[0] != count
        ]
        if odd:
            problems.append(
                f"The experts {short} have {', '.join(odd)} beside parameters of the shape [{count}, ...], "
                "and only these are divided by experts. Leave out ep."
            )
        elif "base_layer" in name.split("."):
            problems.append(
                f"The experts {short} are adapted by another module, such as by target_parameters of PEFT, "
                "which computes with their whole weights. Adapt linear layers only, or leave out ep."
            )
        elif shared := [each for each, value in own.items() if uses[id(value)] > 1]:
            problems.append(
                f"The experts {short} share {', '.join(shared)} with another module, which would have one of "
                "its own then. Leave out ep, or give each module its own."
            )
        elif count % ranks:
            allowed = [size for size in range(1, count + 1) if count % size == 0]
            problems.append(
                f"expert={ranks} does not divide the {count} experts of {short}. Allowed values of expert "
                f"are {', '.join(map(str, allowed))}."
            )
        elif "forward" in vars(module):
            problems.append(
                f"The experts {short} have a forward that was replaced on the object, which tokens would not "
                "be sent by. Divide them first, and replace it afterwards."
            )
        found.append(name)
    if not found:
        problems.append(
            f"The model {type(model).__name__} has no experts that can be divided: a module with an "
            "attribute num_experts, parameters of the shape [experts, ...], and a forward of (hidden_states, "
            "top_k_index, top_k_weights). Leave out ep."
        )
    if problems:
        raise PlanError("\n".join(dict.fromkeys(problems)))
    return found


_COUNT = "num_experts"
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def _is_called_with_choice(module: nn.Module) -> bool:
    return tuple(inspect.signature(type(module).forward).parameters)[1:4] == _ARGUMENTS


def _check_same(model: nn.Module, found: list[str], mesh: DeviceMesh, same_tokens: DeviceMesh | None) -> None:
    """Refuse different models, and let all ranks know of one that refuses."""
    facts = [
        (f"{name}.{own}", tuple(value.shape), str(value.dtype), value.requires_grad, value.is_meta)
        for name in found
        for own, value in model.get_submodule(name).named_parameters()
    ]
    tokens = 1 if same_tokens is None else same_tokens.size()
    check_same(
        (facts, tokens) if found else None,
        mesh,
        refused="The experts were refused",
        differs="have other experts or another same_tokens",
    )


@dataclass(eq=False)
class Dispatched(Style):
    """Experts of which each rank holds some; tokens are sent to them.

    Attributes:
        same_tokens: Ranks that have the same tokens, unless `sequence` says that each has its own.
        here: How many of them this rank holds.
    """

    same_tokens: DeviceMesh | None = None
    here: int = field(kw_only=True)

    def placement(self, name: str) -> Placement:
        """By experts."""
        return Shard(0)

    @not_compiled
    def forward(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send this rank's tokens through their experts."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(_ARGUMENTS) or set(given) != set(_ARGUMENTS):
            raise TypeError(
                f"Experts were called with {len(args)} arguments and the names {sorted(kwargs)}. Where they "
                f"are divided they take {', '.join(_ARGUMENTS)}, each once, and nothing else."
            )
        tensors: list[Tensor] = [given[name] for name in _ARGUMENTS]
        x, chosen, weights = tensors
        if x.ndim != 2 or chosen.ndim != 2 or chosen.shape != weights.shape or len(chosen) != len(x):
            shapes = ", ".join(f"{name} {list(given[name].shape)}" for name in _ARGUMENTS)
            raise ValueError(
                f"Experts were called with the shapes {shapes}. Give tokens [tokens, hidden], and choices "
                "and weights [tokens, used]."
            )
        mesh = self.same_tokens
        if mesh is None or mesh.size() == 1 or self.sequence:
            return self._routed(module, call, x, chosen, weights)
        parts = [split(each, mesh, 0) for each in (x, weights)]
        # Numbers have no gradient.
        own = torch.chunk(chosen, mesh.size())[mesh.get_local_rank() :][:1]
        out = self._routed(module, call, parts[0], own[0] if own else chosen[:0], parts[1])
        return unaliased(gathered(out, mesh, 0, len(x)))

    def _routed(self, module: nn.Module, call: Call, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        group, here = self.mesh.get_group(), self.here
        used = chosen.shape[-1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by experts, and so by ranks
        counts = flat.new_zeros(here * self.mesh.size()).scatter_add_(0, flat, torch.ones_like(flat))
        travel = _travel(counts, len(flat), here, group)
        arrived = _exchange(x[order // used], travel.sent, travel.got, group)
        number, ones = travel.numbers.unsqueeze(-1), weights.new_ones(len(arrived), 1)
        if not len(arrived):
            # Without a token a module need not work, and its weights would have no gradient, which those who
            # share them wait for.
            arrived, number, ones = (
                arrived.new_zeros(1, x.shape[-1]) + arrived.sum(),
                number.new_zeros(1, 1),
                ones.new_ones(1, 1),
            )
        with local_parameters(module, self.mesh):
            y: Tensor = call(arrived, number, ones)
        y = y[: len(travel.numbers)]
        back = _exchange(y, travel.got, travel.sent, group)
        out: Tensor = back * weights.flatten()[order].unsqueeze(-1)
        # By places, and not by index_add_, which gives other bits each time on a GPU.
        out = out[order.argsort()].view(*chosen.shape, x.shape[-1])
        return out.sum(dim=-2).to(x.dtype)


@dataclass(frozen=True)
class _Travel:
    """Who sends how many tokens to whom."""

    sent: list[int]
    """To each rank."""
    got: list[int]
    """From each rank."""
    numbers: Tensor
    """Which of this rank's experts each token that arrives goes to: int64 [tokens]."""


def _travel(counts: Tensor, tokens: int, here: int, group: ProcessGroup) -> _Travel:
    """Tell the ranks how many tokens come to each of their experts; the host waits for the numbers.

    Args:
        counts: Tokens of this rank for each expert, int64 [experts].
        tokens: Their sum.
        here: Experts of each rank.
        group: The ranks.
    """
    ranks = group.size()
    if counts.is_meta or isinstance(counts, FakeTensor):
        # Without values, as in a dry run: as if every expert got equally many. The class is private to torch
        # (2.13).
        even = [len(part) for part in torch.empty(tokens, device="meta").tensor_split(ranks)]
        return _Travel(even, even, counts.new_empty(tokens))
    # Of a fake process group, which moves nothing, as if the others sent as much.
    expected = counts.clone()
    dist.all_to_all_single(expected, counts, group=group)
    both = torch.stack([counts.view(ranks, here).sum(dim=1), expected.view(ranks, here).sum(dim=1)])
    sent, got = both.tolist()
    # They come by rank, and by expert from each: a token is of the expert before whose end it lies.
    places = torch.arange(sum(got), device=counts.device)
    return _Travel(sent, got, torch.searchsorted(expected.cumsum(0), places, right=True) % here)


class _ExchangeContext(FunctionCtx):
    back: tuple[list[int], list[int], ProcessGroup]


class _Exchange(torch.autograd.Function):
    """Sends rows of a tensor to other ranks, some to each; the gradient goes back the same way."""

    @staticmethod
    def forward(
        ctx: _ExchangeContext, x: Tensor, sent: list[int], got: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.back = got, sent, group
        return _exchanged(x, sent, got, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ExchangeContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, *ctx.back), None, None, None


_exchange: Callable[[Tensor, list[int], list[int], ProcessGroup], Tensor] = _Exchange.apply


def _exchanged(x: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out
