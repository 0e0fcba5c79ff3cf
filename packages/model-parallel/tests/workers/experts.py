"""Divides the experts of small models, and notes how far each case is from one process with all tokens.

A deviation is the largest difference, relative to the largest value expected.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import Decoder
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import divide_experts, experts, shard_tensors, whole_sequences

WIDTH, HIDDEN, EXPERTS = 16, 24, 8
MISSING = 1e9
"""In the place of a deviation, where a gradient is None."""


class Router(nn.Module):
    """The experts of the highest probability among those `allowed`."""

    def __init__(self, used: int, allowed: list[int] | None) -> None:
        super().__init__()
        self.used = used
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.5)
        self.closed = torch.tensor([allowed is not None and each not in allowed for each in range(EXPERTS)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x.float() @ self.weight.t().float()).masked_fill(self.closed, -torch.inf).softmax(-1)
        weights, chosen = scores.topk(self.used, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Weights(nn.Module):
    """As in transformers: experts without a token are left out, so that they alone would have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                inner = self.act_fn(F.linear(hidden_states[token], self.up[expert], self.bias[expert]))
                made = F.linear(inner, self.down[expert]) * top_k_weights[token, place, None]
                out = out.index_add(0, token, made.to(out.dtype))
        return out


class Mixture(nn.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, used: int = 2, allowed: list[int] | None = None) -> None:
        super().__init__()
        self.gate = Router(used, allowed)
        self.experts = Weights()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x.flatten(0, -2))
        return self.experts(x.flatten(0, -2), chosen, top_k_weights=weights).view(x.shape)


class Block(nn.Module):
    def __init__(self, used: int = 2, allowed: list[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(used, allowed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(torch.tanh(self.before(x)))


def rows(count: int, rank: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def loss_of(y: Tensor) -> Tensor:
    return (y.float() * torch.linspace(-1, 1, WIDTH)).sum() + y.float().square().sum() / 2


def far(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return MISSING
    found = found.full_tensor() if isinstance(found, DTensor) else found
    if found.shape != expected.shape or not found.isfinite().all():
        return MISSING
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


Gradients = dict[str, Tensor | None]


def gradients(model: nn.Module, sum_over: DeviceMesh | None) -> Gradients:
    """Those of experts are whole; the others are summed over ranks with tokens of their own."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            if ".experts." not in name and sum_over is not None:
                dist.all_reduce(gradient, group=sum_over.get_group())
        found[name] = gradient
    return found


def backward(
    model: nn.Module, x: Tensor, *, call: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, loss, and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = (model if call is None else call)(x)
    loss = loss_of(y)
    loss.backward()
    assert x.grad is not None
    return y.detach(), loss.detach(), x.grad


def deviations(
    mesh: DeviceMesh,
    tokens: list[int],
    *,
    used: int = 2,
    allowed: list[int] | None = None,
    change: Callable[[nn.Module], Any] | None = None,
    around: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model,
    single_around: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model,
) -> dict[str, float]:
    """Of a block whose experts are divided, where each rank has other tokens."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    given = [rows(tokens[each % len(tokens)], each) for each in range(ranks)]
    single, model = Block(used, allowed), Block(used, allowed)
    for each in (single, model) if change else ():
        change(each)
    y, loss, x_gradient = backward(single, torch.cat(given), call=single_around(single))
    sizes = [len(each) for each in given]
    divide_experts(model, mesh)
    own, own_loss, own_gradient = backward(model, given[rank], call=around(model))
    total = own_loss.clone()
    dist.all_reduce(total, group=mesh.get_group())
    notes = {
        "output": far(own, y.split(sizes)[rank]),
        "loss": far(total, loss),
        "input": far(own_gradient, x_gradient.split(sizes)[rank]),
    }
    found = gradients(model, mesh)
    for name, parameter in single.named_parameters():
        if parameter.requires_grad:
            # What no token of any rank goes to has zeros, on a rank that shares its weights with others too.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            notes[name] = far(found[name], gradient)
        elif found[name] is not None:
            notes[name] = MISSING
    return notes


def same_deviations(mesh: DeviceMesh, count: int, **settings: Any) -> dict[str, float]:
    """Of a block whose ranks all have the same tokens: each has all of them, and whole gradients."""
    single, model = Block(), Block()
    y, _, x_gradient = backward(single, rows(count, 0))
    divide_experts(model, mesh, **{"same_tokens": mesh, **settings})
    own, _, own_gradient = backward(model, rows(count, 0))
    notes = {"output": far(own, y), "input": far(own_gradient, x_gradient)}
    found = gradients(model, None)
    for name, parameter in single.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        notes[name] = far(found[name], gradient)
    return notes


UNEVEN = [5, 9, 2, 12]
CASES: dict[str, dict[str, Any]] = {
    "even": {"tokens": [6]},
    "uneven": {"tokens": UNEVEN},
    "a rank without tokens": {"tokens": [7, 0, 3, 5]},
    "the first rank without tokens": {"tokens": [0, 7, 0, 5]},
    "no tokens at all": {"tokens": [0]},
    "top 1": {"tokens": UNEVEN, "used": 1},
    "top 3": {"tokens": UNEVEN, "used": 3},
    "all experts": {"tokens": UNEVEN, "used": EXPERTS},
    "experts without tokens": {"tokens": UNEVEN, "allowed": [1, 4, 6]},
    "a rank whose experts have no token": {"tokens": UNEVEN, "allowed": [0, 1]},
    "all ranks but the last": {"tokens": UNEVEN, "allowed": [6, 7]},
    "all tokens to one expert": {"tokens": UNEVEN, "used": 1, "allowed": [5]},
    "one token": {"tokens": [1, 0, 0, 0]},
}


# Mistakes that a layer of experts may have.


def scaled_backward(factor: float) -> Any:
    def run(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return factor * experts._exchanged(gradient, *ctx.back), None, None, None

    return patch.object(experts._Exchange, "backward", staticmethod(once_differentiable(run)))


def routed(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Tokens, choice and weights are changed before tokens are sent."""
    own = experts.Dispatched._routed

    def run(self: Any, module: nn.Module, call: Any, *given: Tensor) -> Tensor:
        return own(self, module, call, *change(module, *given))

    return patch.object(experts.Dispatched, "_routed", run)


def beyond_share(
    module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    share = -(-chosen.numel() // EXPERTS)
    before = F.one_hot(chosen.flatten(), EXPERTS).cumsum(0).gather(1, chosen.flatten()[:, None])
    return x, chosen, weights * (before.view(chosen.shape) <= share)


def other_numbers() -> Any:
    own = experts._travel

    def run(counts: Tensor, tokens: int, here: int, group: Any) -> Any:
        travel = own(counts, tokens, here, group)
        return experts._Travel(travel.sent, travel.got, here - 1 - travel.numbers)

    return patch.object(experts, "_travel", run)


def order_kept() -> Any:
    own = Tensor.argsort

    def run(self: Tensor, **settings: Any) -> Tensor:
        return own(self, **settings) if settings else torch.arange(len(self))

    return patch.object(Tensor, "argsort", run)


def mistakes(ranks: int) -> dict[str, Callable[[], Any]]:
    def neighbour(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, (chosen + module.num_experts) % EXPERTS, weights

    return {
        "gradients times the ranks": lambda: scaled_backward(ranks),
        "gradients divided by the ranks": lambda: scaled_backward(1 / ranks),
        "gradients of experts summed over ranks": lambda: patch.object(
            experts, "local_parameters", partial(experts.local_parameters, sum_gradients=True)
        ),
        "weights twice": lambda: routed(lambda module, x, chosen, weights: (x, chosen, weights.square())),
        "weights without a gradient": lambda: routed(lambda module, x, chosen, w: (x, chosen, w.detach())),
        "tokens without a gradient": lambda: routed(lambda module, x, chosen, w: (x.detach(), chosen, w)),
        "tokens beyond an even share dropped": lambda: routed(beyond_share),
        "the experts of the next rank": lambda: routed(neighbour),
        "other experts of the rank": other_numbers,
        "the order of experts kept": order_kept,
    }


# What is done with a divided model.


class Decoding(Decoder):
    """A decoder whose second layer has experts."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, heads=4)
        self.model.layers[1].mlp = Mixture()

    @property
    def tp_plan(self) -> dict[str, str]:
        own = {name: style for name, style in super().tp_plan.items() if "mlp" not in name}
        dense = {f"model.layers.0.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
        return {
            **own,
            **dense,
            "model.layers.0.mlp.down_proj": "rowwise",
            "model.layers.*.mlp.experts": "moe_tp_experts",
            "model.layers.*.mlp.experts.up": "packed_colwise",
        }


def tokens_of(group: int, length: int) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(7 + group))


def share_out(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide weights over ranks, which add up gradients and do not average them."""
    sharded = fully_shard(module, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def decoded(layout: str, *, sequence: bool) -> dict[str, float]:
    """Of a decoder that `shard_tensors` divides too; ranks of other dimensions have other batches."""
    meshes = Meshes(ParallelLayout.parse(layout))
    groups, group = meshes.data.size(), meshes.data.get_local_rank()
    single, model = Decoding(), Decoding()
    loss = sum(
        F.cross_entropy(single(tokens_of(each, 8)).flatten(0, 1), target)
        for each, target in ((each, tokens_of(each, 8).flatten()) for each in range(groups))
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert meshes.expert is not None
    assert meshes.expert_fsdp is not None
    # Those that shard_tensors finds divided are told of its ranks, whatever was said before.
    divide_experts(model, meshes.expert, same_tokens=meshes.tensor if sequence else None)
    shard_tensors(model, meshes.tensor, sequence=sequence)
    if meshes.expert_fsdp.size() > 1:
        share_out(model.model.layers[1].mlp.experts, meshes.expert_fsdp)
    own = F.cross_entropy(model(tokens_of(group, 8)).flatten(0, 1), tokens_of(group, 8).flatten())
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total, group=meshes.data.get_group())
    notes = {"loss": far(total, loss.detach())}
    found = gradients(model, meshes.data)
    for name, parameter in single.named_parameters():
        assert parameter.grad is not None
        notes[name] = far(found[name], parameter.grad)
    text, expected = (tokens_of(group, 3) for _ in range(2))
    with whole_sequences(model):
        for _ in range(4):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
            expected = torch.cat([expected, single(expected)[:, -1:].argmax(-1)], 1)
        notes["text"] = float((text != expected).sum())
        notes["logits"] = far(model(text), single(text))
    return notes


def shared_weights() -> dict[str, float]:
    """Of experts whose ranks share them out over a mesh of their own, each with other tokens."""
    meshes = Meshes(ParallelLayout.parse("shard=4,ep=2"))
    assert meshes.expert is not None
    assert meshes.expert_fsdp is not None
    notes: dict[str, float] = {}
    for what, allowed in (("", None), ("a rank without, ", [0, 1])):
        single, model = Block(allowed=allowed), Block(allowed=allowed)
        given = [rows(count, each) for each, count in enumerate([5, 0, 2, 12])]
        sizes, rank = [len(each) for each in given], dist.get_rank()
        y, _, x_gradient = backward(single, torch.cat(given))
        divide_experts(model, meshes.expert)
        share_out(model.mixture.experts, meshes.expert_fsdp)
        own, _, own_gradient = backward(model, given[rank])
        notes[f"{what}output"] = far(own, y.split(sizes)[rank])
        notes[f"{what}input"] = far(own_gradient, x_gradient.split(sizes)[rank])
        found = gradients(model, meshes.fsdp)
        for name, parameter in single.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            notes[f"{what}{name}"] = far(found[name], gradient)
    return notes


def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False)


def compiled(backend: str) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    return lambda model: torch.compile(model, backend=backend)


def in_bfloat16(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return run


def twice(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(torch.tanh(model(x)))


def frozen(*names: str) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(names))

    return run


def uses(mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    run = partial(deviations, mesh, UNEVEN)
    no_token = {"tokens": [5, 9], "allowed": [0, 1]}
    return {
        "checkpointed": run(around=checkpointed),
        "checkpointed, a rank whose experts have no token": deviations(mesh, **no_token, around=checkpointed),
        "checkpointed, a rank without tokens": deviations(mesh, [4, 0], around=checkpointed),
        "bfloat16": run(around=in_bfloat16, single_around=in_bfloat16),
        "twice in a pass": run(around=twice, single_around=twice),
        "frozen experts": run(change=frozen("mixture.experts")),
        "frozen up": run(change=frozen("mixture.experts.up")),
        "frozen router": run(change=frozen("mixture.gate")),
        "frozen experts, no token": deviations(mesh, **no_token, change=frozen("mixture.experts")),
        "the experts alone": run(change=frozen("before", "mixture.gate")),
    }


def others(mesh: DeviceMesh) -> dict[str, Any]:
    """What is not compared by its gradients."""
    rank, notes = mesh.get_local_rank(), {}
    x = rows(6, rank)
    single, model = Block(), Block()
    names = list(model.state_dict())
    divide_experts(model, mesh)
    notes["names"] = list(model.state_dict()) == names
    with torch.no_grad():
        expected = single(x)
        notes["no_grad"] = far(model(x), expected)
        notes["copy"] = far(copy.deepcopy(model)(x), expected)
        fresh = Block()
        fresh.before.reset_parameters()
        divide_experts(fresh, mesh)
        fresh.load_state_dict(model.state_dict())
        notes["loaded"] = far(fresh(x), expected)
    with torch.inference_mode():
        notes["inference"] = far(model(x), expected)
        same = Block()
        divide_experts(same, mesh, same_tokens=mesh)
        notes["inference, same tokens"] = far(same(rows(5, 0)), single(rows(5, 0)))
    # Gradients of leaves, when the graph is gone through twice.
    y = loss_of(model(x))
    y.backward(retain_graph=True)
    once = {name: each for name, each in gradients(model, mesh).items() if each is not None}
    y.backward()
    second = gradients(model, mesh)
    notes["retained"] = max(far(second[name], 2 * each) for name, each in once.items())
    x.requires_grad_()
    (first,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    notes["second order"] = raised(lambda: first.square().sum().backward())[1]
    values = Block()
    for parameter in values.parameters():
        parameter.data += rank  # the values of the first rank count
    divide_experts(values, mesh)
    notes["values"] = far(values.mixture.experts.up, single.mixture.experts.up)
    local = model.mixture.experts.up
    assert isinstance(local, DTensor)
    notes["held"] = list(local.to_local().shape)
    notes["storage"] = local.to_local().untyped_storage().nbytes() // 4
    return notes


# Models that are refused.


class Chosen(nn.Module):
    """Other experts: what they own is given."""

    def __init__(self, count: int = EXPERTS, **own: object) -> None:
        super().__init__()
        self.num_experts = count
        for name, value in own.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class Fixed(Chosen):
    """Its number cannot become that of one rank."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up = weight(EXPERTS, 2)

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        return EXPERTS


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def replaced() -> nn.Module:
    model = Block()
    model.mixture.experts.forward = lambda *given: given[0]  # type: ignore[method-assign]
    return model


def tied() -> nn.Module:
    first = Chosen(up=weight(EXPERTS, 2))
    return nn.Sequential(first, Chosen(up=first.up))


def raised(act: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def refusals(mesh: DeviceMesh) -> dict[str, tuple[str, str, float]]:
    first, last = mesh.get_local_rank() == 0, mesh.get_local_rank() == mesh.size() - 1
    plane = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("a", "b"))
    divided, untouched = Block(), Block()
    divide_experts(divided, mesh)
    x = rows(3, 0)
    chosen, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    layer = divided.mixture.experts
    cases: dict[str, Callable[[], Any]] = {
        "without experts": lambda: divide_experts(Decoder(), mesh),
        "a count that does not divide": lambda: divide_experts(Chosen(7, up=weight(7, 2)), mesh),
        "another parameter": lambda: divide_experts(Chosen(up=weight(EXPERTS, 2), scale=weight(3)), mesh),
        "a number": lambda: divide_experts(Chosen(up=weight(EXPERTS, 2), scale=weight()), mesh),
        "modules with parameters": lambda: divide_experts(
            Chosen(up=weight(EXPERTS, 2), norm=nn.LayerNorm(2)), mesh
        ),
        "a number that is a property": lambda: divide_experts(Fixed(), mesh),
        "a buffer": lambda: divide_experts(Chosen(up=weight(EXPERTS, 2), seen=torch.ones(EXPERTS)), mesh),
        "tied": lambda: divide_experts(tied(), mesh),
        "adapted": lambda: divide_experts(nn.ModuleDict({"base_layer": Chosen(up=weight(EXPERTS, 2))}), mesh),
        "divided already": lambda: divide_experts(divided, mesh),
        "tensors divided already": lambda: divide_experts(shard_tensors(Decoding(), mesh, TENSORS), mesh),
        "two dimensions": lambda: divide_experts(untouched, plane),
        "same tokens of two dimensions": lambda: divide_experts(untouched, mesh, same_tokens=plane),
        "same tokens on one rank": lambda: divide_experts(
            untouched, mesh, same_tokens=mesh if last else None
        ),
        "other models": lambda: divide_experts(Chosen(up=weight(EXPERTS, 3 if last else 2)), mesh),
        "other names": lambda: divide_experts(
            nn.Sequential(Chosen(up=weight(EXPERTS, 2))) if last else Chosen(up=weight(EXPERTS, 2)), mesh
        ),
        "a replaced forward": lambda: divide_experts(replaced(), mesh),
        "refused by the last": lambda: divide_experts(Decoder() if last else untouched, mesh),
        "refused by the first": lambda: divide_experts(Decoder() if first else untouched, mesh),
        "an unknown keyword": lambda: layer(x, chosen, weights, scale=2.0),
        "a fourth argument": lambda: layer(x, chosen, weights, 2.0),
        "an argument twice": lambda: layer(x, chosen, weights, top_k_index=chosen),
        "without weights": lambda: layer(x, chosen),
        "more tokens than choices": lambda: layer(torch.cat([x, x]), chosen, weights),
        "weights of another shape": lambda: layer(x, chosen, weights.t()),
        "rows of tokens": lambda: layer(x[None], chosen[None], weights[None]),
        "an expert beyond the last": lambda: layer(x, chosen + EXPERTS, weights),
    }
    notes = {}
    for name, act in cases.items():
        notes[name] = raised(act)
        dist.barrier()
    whole = not any(isinstance(each, DTensor) for each in untouched.parameters())
    notes["untouched"] = (str(whole and untouched.mixture.experts.num_experts == EXPERTS), "", 0.0)
    return notes


TENSORS = {name: style for name, style in Decoding().tp_plan.items() if "experts" not in name}


def main(parts: list[str]) -> None:
    notes: dict[str, Any] = {}
    with DistributedEnvironment(no_accelerator=True) as env:
        ranks = env.world_size
        mesh = init_device_mesh("cpu", (ranks,))
        for part in parts:
            start = time.monotonic()
            if part == "cases":
                notes |= {name: deviations(mesh, **case) for name, case in CASES.items()}
            elif part == "mistakes":
                for name, mistake in mistakes(ranks).items():
                    with mistake():
                        notes[name] = deviations(mesh, UNEVEN)
                notes["same tokens sent by each"] = same_deviations(mesh, 7, same_tokens=None)
            elif part == "same":
                notes |= {f"same, {count}": same_deviations(mesh, count) for count in (0, 1, 5, 8)}
            elif part == "decoder":
                layouts = ("tensor=2,ep=2",) if ranks == 2 else ("shard=2,tensor=2,ep=4", "tensor=4,ep=2")
                for layout in layouts:
                    for sequence in (False, True):
                        notes[f"{layout}, {sequence}"] = decoded(layout, sequence=sequence)
            elif part == "shared":
                notes["shared"] = shared_weights()
            elif part == "uses":
                notes["uses"] = uses(mesh)
            elif part == "others":
                notes["others"] = others(mesh)
            elif part == "compiled":
                notes[part] = deviations(mesh, UNEVEN, around=compiled("aot_eager"))
            elif part == "refusals":
                notes["refusals"] = refusals(mesh)
            notes[f"seconds of {part}"] = time.monotonic() - start
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
