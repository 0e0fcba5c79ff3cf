"""Notes what becomes of models that would be divided wrongly without an error, or of their gradients."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import Decoder, RMSNorm, batches, plain_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import shard_tensors, sharded_linear_cross_entropy

TOKENS, TARGETS = next(iter(batches(64, 1)))
PLAN = Decoder().tp_plan
ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"


class FixedHeads(nn.Module):
    """An attention whose heads are numbers that it keeps, and not what the width of its queries gives."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.n_rep = 4, kv_heads, 4 // kv_heads
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(32, 8 * kv_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.num_heads, -1).transpose(1, 2)
        k, v = (
            p(x).view(rows, length, self.num_kv_heads, -1).repeat_interleave(self.n_rep, 2).transpose(1, 2)
            for p in (self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class Fused(nn.Module):
    """An attention with one layer for all queries, then all keys, then all values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.qkv_proj, self.o_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv_proj(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Unnamed(nn.Module):
    """The same, with its output projection in a module, and the size of its heads under no usual name."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.each = 8
        self.qkv_proj, self.out = nn.Linear(32, 96), nn.Sequential(nn.Linear(32, 32), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv_proj(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, self.each)).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """An MLP that norms its own input, which is whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(32)
        self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(self.norm(x))))


class NormedBehind(nn.Module):
    """An MLP that norms what its rowwise layer returns, which `sequence=True` divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.norm = nn.Linear(32, 48), nn.Linear(48, 32), RMSNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down_proj(F.silu(self.up_proj(x))))


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.b = (
            nn.Linear(inputs, outputs).requires_grad_(False),
            nn.Linear(4, outputs, bias=False),
        )
        self.a = nn.Linear(inputs, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class WithAdapters(nn.Module):
    """An MLP of which one or two layers have adapters."""

    def __init__(self, down: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), Adapted(32, 48)
        self.down_proj = Adapted(48, 32) if down else nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Repeated(Decoder):
    """Goes through its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers.__class__ = type("Twice", (nn.ModuleList,), {"__iter__": twice})


def twice(layers: nn.ModuleList) -> Any:
    for _ in range(2):
        yield from nn.ModuleList.__iter__(layers)


class Skipping(Decoder):
    """Leaves out its first layer, as LayerDrop does now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers.__class__ = type("Rest", (nn.ModuleList,), {"__iter__": rest})


def rest(layers: nn.ModuleList) -> Any:
    yield from list(nn.ModuleList.__iter__(layers))[1:]


def exchanged(name: str, make: Callable[[], nn.Module]) -> Decoder:
    """A decoder with other modules of this name in its layers."""
    model = Decoder()
    torch.manual_seed(5)
    for layer in model.model.layers:
        setattr(layer, name, make())
    return model


def without(part: str, **styles: str) -> dict[str, str]:
    """The plan, with the layers of one module left to `styles`."""
    kept = {name: style for name, style in PLAN.items() if part not in name}
    return kept | {f"{part}.{name}": style for name, style in styles.items()}


def backward(model: nn.Module) -> nn.Module:
    loss = plain_loss(model(TOKENS), TARGETS) / (TARGETS != -100).sum()
    loss.backward()
    return model


def difference(divided: nn.Module, single: nn.Module) -> float:
    """The largest difference of a gradient, relative to the largest gradient of that parameter."""
    backward(single)
    backward(divided)
    found = dict(divided.named_parameters())
    return max(
        float((found[name].grad.full_tensor() - each.grad).abs().max() / each.grad.abs().max())
        for name, each in single.named_parameters()
        if each.grad is not None
    )


def empty(mesh: DeviceMesh) -> float:
    """Whether a tied model that was made on the meta device is two weights after `to_empty`."""
    with torch.device("meta"):
        model = Decoder(tied=True)
    shard_tensors(model, mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    model(TOKENS)
    return float(model.lm_head.weight is not model.model.embed_tokens.weight)


def untied(mesh: DeviceMesh, fsdp: DeviceMesh) -> Decoder:
    """A tied model whose weight `fully_shard` makes two of, as it is in two of its groups."""
    model = shard_tensors(Decoder(tied=True), mesh)
    fully_shard(model.model.embed_tokens, mesh=fsdp)
    fully_shard(model, mesh=fsdp)
    return model


def loaded(mesh: DeviceMesh) -> Decoder:
    """A tied model whose head was given a weight of its own afterwards."""
    model = shard_tensors(Decoder(tied=True), mesh)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def frozen(rank: int) -> Decoder:
    model = Decoder()
    model.model.norm.requires_grad_(rank == 0)
    return model


def with_buffer(rank: int) -> Decoder:
    """Scales its embeddings by numbers that each rank has drawn for itself."""
    model = Decoder()
    model.model.register_buffer("scale", torch.rand(32, generator=torch.Generator().manual_seed(rank)))
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * model.model.scale)
    return model


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


class Standardized(nn.Linear):
    """A linear layer that works on its whole weight: it takes the mean of each row off."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


def standardized() -> Decoder:
    model = Decoder()
    for layer in model.model.layers:
        layer.mlp.down_proj = Standardized(48, 32)
    return model


def warned(mesh: DeviceMesh, model: Decoder, plan: dict[str, str]) -> str:
    handler = Warnings()
    logging.getLogger("model_parallel").addHandler(handler)
    logging.getLogger("model_parallel.shard").addHandler(handler)
    shard_tensors(model, mesh, plan)
    return handler.text


def cases(mesh: DeviceMesh, fsdp: DeviceMesh, rank: int) -> dict[str, Callable[[], Any]]:
    def fixed(kv_heads: int) -> float:
        made = (exchanged("self_attn", lambda: FixedHeads(kv_heads)) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, PLAN), next(made))

    in_module = without(ATTENTION, qkv_proj="packed_colwise", **{"out.0": "rowwise"})

    def fused_attention() -> float:
        plan = without(ATTENTION, qkv_proj="packed_colwise", o_proj="rowwise")
        made = (exchanged("self_attn", Fused) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, plan), next(made))

    def unnamed_attention() -> float:
        made = (exchanged("self_attn", Unnamed) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, in_module), next(made))

    def dropped() -> float:
        model = shard_tensors(exchanged("self_attn", lambda: Unnamed(0.5)), mesh, in_module).train()
        y = model.model(TOKENS)
        first = y.detach().clone()
        dist.broadcast(first, group=mesh.get_group(), group_src=0)
        return float((y - first).abs().max())

    def behind(style: str, sequence: bool = True) -> float:
        plan = without(MLP, norm=style, up_proj="colwise", down_proj="rowwise")
        made = (exchanged("mlp", NormedBehind) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, plan, sequence=sequence), next(made))

    def adapted(down: bool) -> float:
        layers = {"gate_proj": "colwise", "up_proj.base": "colwise", "up_proj.b": "colwise"}
        layers |= {"up_proj.a": "replicate"}
        below = {"down_proj.base": "rowwise", "down_proj.a": "rowwise", "down_proj.b": "replicate"}
        plan = without(MLP, **layers, **(below if down else {"down_proj": "rowwise"}))
        made = (exchanged("mlp", lambda: WithAdapters(down)) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, plan), next(made))

    def normed(style: str) -> float:
        plan = without(MLP, norm=style, up_proj="colwise", down_proj="rowwise")
        made = (exchanged("mlp", Normed) for _ in range(2))
        return difference(shard_tensors(next(made), mesh, plan), next(made))

    def head_norm(style: str) -> float:
        plan = {**Decoder(norm=True).tp_plan, f"{ATTENTION}.q_norm": style}
        return difference(shard_tensors(Decoder(norm=True), mesh, plan), Decoder(norm=True))

    def fused_loss() -> Tensor:
        model = untied(mesh, fsdp)
        return sharded_linear_cross_entropy(torch.ones(*TARGETS.shape, 32), model.lm_head, TARGETS)

    def buffers() -> float:
        divided = shard_tensors(with_buffer(rank), mesh)
        return float((divided(TOKENS) - with_buffer(0)(TOKENS)).abs().max())

    return {
        "tied, to_empty": lambda: empty(mesh),
        "tied, untied afterwards": lambda: loaded(mesh)(TOKENS),
        "tied, in two groups, fused loss": fused_loss,
        "a number of heads": lambda: fixed(4),
        "a number of key-value heads": lambda: fixed(2),
        "a number of key-value heads below the ranks": lambda: fixed(1),
        "queries, keys and values stacked": fused_attention,
        "stacked, with the output in a module": unnamed_attention,
        "dropout behind an output in a module": dropped,
        "an adapter in one of three layers": lambda: adapted(False),
        "adapters in two of three layers": lambda: adapted(True),
        "a norm behind rowwise layers": lambda: behind("sequence", sequence=False),
        "a norm behind rowwise layers, sequence": lambda: behind("sequence"),
        "a norm behind rowwise layers, replicate": lambda: behind("replicate"),
        "stacked, called colwise": lambda: warned(
            mesh,
            exchanged("self_attn", Fused),
            without(ATTENTION, qkv_proj="colwise", o_proj="rowwise"),
        ),
        "a layer that works on its whole weight": lambda: warned(mesh, standardized(), PLAN),
        "layers twice": lambda: difference(shard_tensors(Repeated(), mesh, sequence=True), Repeated()),
        "the first layer left out": lambda: shard_tensors(Skipping(), mesh, sequence=True)(TOKENS),
        "a norm of whole inputs, replicate": lambda: normed("replicate"),
        "a norm of whole inputs, summed": lambda: normed("replicated_with_grad_allreduce"),
        "a norm of heads, replicate": lambda: head_norm("replicate"),
        "a norm of heads, summed": lambda: head_norm("replicated_with_grad_allreduce"),
        "a buffer of each rank": buffers,
        "frozen on one": lambda: shard_tensors(frozen(rank), mesh),
    }


def main() -> None:
    notes: dict[str, Any] = {}
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes = Meshes(ParallelLayout(tensor=env.world_size))
        for name, act in cases(meshes.tensor, meshes.fsdp, env.rank).items():
            try:
                found = act()
                notes[name] = found if isinstance(found, float | str) else "nothing"
            except (RuntimeError, ValueError) as error:
                notes[name] = f"{type(error).__name__}: {error}"
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
