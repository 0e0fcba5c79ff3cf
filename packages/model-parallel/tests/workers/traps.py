"""Notes what torch's own functions make of a divided model, and what ours do."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decoder import Decoder, batches, plain_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import shard_tensors

TOKENS, TARGETS = next(iter(batches(64, 1)))


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def backward(model: nn.Module) -> nn.Module:
    loss = plain_loss(model(TOKENS), TARGETS) / (TARGETS != -100).sum()
    loss.backward()
    return model


def difference(model: nn.Module, single: nn.Module, part: str = "") -> float:
    """The largest difference of a gradient, relative to the largest gradient of that parameter."""
    expected = {name: each.grad for name, each in single.named_parameters() if part in name}
    assert expected
    found = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in model.named_parameters()}
    return max(
        float((whole(found[name].grad) - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.items()
    )


def local_norm(model: nn.Module, mesh: DeviceMesh) -> float:
    """Squares of what each rank holds, summed over ranks where gradients are divided."""
    total = torch.zeros(())
    for parameter in model.parameters():
        gradient = parameter.grad
        square = gradient.to_local().square().sum()
        if any(isinstance(each, Shard) for each in gradient.placements):
            torch.distributed.all_reduce(square, group=mesh.get_group())
        total += square
    return float(total.sqrt())


def by_torch(mesh: DeviceMesh, *, sequence: bool, tied: bool = False) -> nn.Module:
    """The plan in torch's own styles."""
    part = Shard(1) if sequence else Replicate()
    model = Decoder(tied=tied)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=part)
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {
            "model.layers.*.self_attn": gather,
            "model.layers.*.mlp": gather,
            "model.norm": SequenceParallel(),
        }
        plan |= {
            f"model.layers.*.{name}": SequenceParallel()
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    return parallelize_module(model, mesh, plan)


class GatedMLP(nn.Module):
    """An MLP that uses its input itself: before the layers, after them, or between them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean(-1, keepdim=True).sigmoid()
        y = F.silu(self.up_proj(x * gate if self.where == "before" else x))
        y = self.down_proj(y * gate if self.where == "between" else y)
        return y * gate if self.where == "after" else y


def gated(where: str) -> Decoder:
    model = Decoder()
    torch.manual_seed(5)
    for layer in model.model.layers:
        layer.mlp = GatedMLP(where)
    return model


GATED = {name: style for name, style in Decoder().tp_plan.items() if "gate_proj" not in name}


class Counter(TorchDispatchMode):
    """Counts collectives. `CommDebugMode` adds hooks, with which each layer is given a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            if "c10d_functional" in str(func) and kind in str(func):
                self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(model: nn.Module) -> dict[str, int]:
    with Counter() as counter:
        backward(model)
    return counter.counts


def clipping_by_torch(mesh: DeviceMesh) -> str:
    model = backward(by_torch(mesh, sequence=False))
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def main() -> None:
    notes: dict[str, Any] = {}
    with DistributedEnvironment(no_accelerator=True):
        meshes = Meshes(ParallelLayout(tensor=2))
        mesh = meshes.tensor
        single = backward(Decoder())
        notes["norm"] = float(nn.utils.get_total_norm([each.grad for each in single.parameters()]))

        torch_tied = by_torch(mesh, sequence=False, tied=True)
        notes["tied by torch"] = torch_tied.lm_head.weight is torch_tied.model.embed_tokens.weight
        tied = shard_tensors(Decoder(tied=True), mesh)
        notes["tied"] = tied.lm_head.weight is tied.model.embed_tokens.weight

        torch_divided = backward(by_torch(mesh, sequence=True))
        notes["placements by torch"] = str(torch_divided.model.norm.weight.grad.placements)
        assert isinstance(torch_divided.model.norm.weight.grad.placements[0], Partial)
        notes["norm of local parts by torch"] = local_norm(torch_divided, mesh)
        # Partial parts differ between ranks, but the notes must not.
        value = torch.tensor(notes["norm of local parts by torch"])
        torch.distributed.broadcast(value, 0)
        notes["norm of local parts by torch"] = float(value)
        notes["norm of local parts"] = local_norm(
            backward(shard_tensors(Decoder(), mesh, sequence=True)), mesh
        )

        notes["clipping by torch"] = clipping_by_torch(mesh)
        divided = backward(shard_tensors(Decoder(), mesh))
        notes["clipping"] = float(nn.utils.clip_grad_norm_(divided.parameters(), 1.0).full_tensor())
        torch.optim.AdamW(divided.parameters(), fused=True).step()
        notes["fused step"] = "done"

        normed = backward(Decoder(norm=True))
        notes["q_norm"] = difference(backward(shard_tensors(Decoder(norm=True), mesh)), normed, "q_norm")

        shared = backward(Decoder(kv_heads=1))
        found = backward(shard_tensors(Decoder(kv_heads=1), mesh))
        notes["k_proj of a shared head"] = difference(found, shared, "k_proj")

        for where, sequence in (("after", False), ("before", False), ("before", True)):
            found = backward(shard_tensors(gated(where), mesh, GATED, sequence=sequence))
            notes[f"gated {where}, {sequence}"] = difference(found, backward(gated(where)))
        for sequence in (False, True):
            try:
                backward(shard_tensors(gated("between"), mesh, GATED, sequence=sequence))
                notes[f"gated between, {sequence}"] = "nothing"
            except RuntimeError as error:
                notes[f"gated between, {sequence}"] = str(error)

        notes["collectives"] = collectives(shard_tensors(Decoder(), mesh))
        notes["collectives, sequence"] = collectives(shard_tensors(Decoder(), mesh, sequence=True))

        divided = shard_tensors(Decoder(), mesh, sequence=True)
        notes["copy"] = torch.equal(copy.deepcopy(divided)(TOKENS), divided(TOKENS))

        padded = Decoder()
        padded.model.embed_tokens.padding_idx = int(TOKENS[0, 0])
        found = backward(shard_tensors(padded, mesh))
        notes["padding"] = float(whole(found.model.embed_tokens.weight.grad)[int(TOKENS[0, 0])].abs().max())

        notes["checkpointed"] = difference(
            backward(checkpointed(shard_tensors(Decoder(), mesh, sequence=True))), single
        )
        compiled = shard_tensors(Decoder(), mesh, sequence=True)
        # One, for each takes seconds.
        compiled.model.layers[0].compile(backend="aot_eager", fullgraph=True)
        notes["compiled"] = difference(backward(compiled), single)
        compiled.model.embed_tokens.compile(backend="aot_eager", fullgraph=True)
        outside = compiled.model.embed_tokens(torch.tensor([[1, 64, -1]]))
        notes["tokens outside, compiled"] = outside.isnan().any(-1).tolist()

        fully = shard_tensors(Decoder(), mesh)
        fully_shard(fully, mesh=Meshes(ParallelLayout(tensor=2)).fsdp)
        try:
            fully.model(TOKENS)
            notes["part of a fully sharded model"] = "nothing"
        except RuntimeError as error:
            notes["part of a fully sharded model"] = str(error)
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    return model


if __name__ == "__main__":
    main()
