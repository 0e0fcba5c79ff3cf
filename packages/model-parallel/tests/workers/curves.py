"""Trains each case on all ranks, and as one process on rank 0, which notes how far they are apart."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoder import Decoder, plain_loss, train
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import shard_tensors, sharded_cross_entropy, sharded_linear_cross_entropy


def main(cases: list[dict[str, Any]]) -> None:
    notes = []
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes: dict[str, Meshes] = {}
        for case in cases:
            layout = case.get("layout", f"tp={env.world_size}")
            if layout not in meshes:
                meshes[layout] = Meshes(ParallelLayout.parse(layout))
            notes.append(run(case, meshes[layout]))
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


def make(case: dict[str, Any]) -> torch.nn.Module:
    """Our decoder, or a model of transformers."""
    if "family" not in case:
        return Decoder(**case.get("model", {}))
    import hf_models

    return hf_models.make(case["family"], **case.get("model", {}))


def run(case: dict[str, Any], meshes: Meshes) -> dict[str, Any]:
    """Deviations of one case."""
    vocabulary = case.get("model", {}).get("vocabulary", 64)
    settings = {"vocabulary": vocabulary, "steps": case.get("steps", 3)}
    kind, extra = case.get("loss", "plain"), case.get("settings", {})

    def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        found = model(tokens)
        return found if isinstance(found, torch.Tensor) else found.logits

    single = make(case)
    initial = {name: value.detach().clone() for name, value in single.named_parameters()}
    is_first = dist.get_rank() == 0
    if is_first:
        expected = train(single, lambda x, y: plain_loss(logits(single, x), y, **extra), **settings)

    model = make(case)
    if case.get("meta"):
        model = torch.nn.Module.to_empty(make_on_meta(case, meshes), device="cpu")
        fill(model, initial)
    else:
        shard_tensors(model, meshes.tensor, sequence=case.get("sequence", False), loss=kind == "sharded")
    names = [name for name, _ in model.named_parameters()]
    part, total = (0, 1), None
    if meshes.layout.shard > 1:
        fully(model, meshes, kind)
        part = meshes.fsdp.get_local_rank(), meshes.fsdp.size()

        def total(loss: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(loss, group=meshes.fsdp.get_group())
            return loss

    bitwise = all(torch.equal(value.full_tensor(), initial[name]) for name, value in model.named_parameters())

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if kind == "fused":
            hidden = model.model(tokens)
            hidden = hidden if isinstance(hidden, torch.Tensor) else hidden.last_hidden_state
            return sharded_linear_cross_entropy(
                hidden, model.lm_head, targets, chunk_tokens=case.get("chunk", 50), **extra
            )
        found = logits(model, tokens)
        assert isinstance(found, DTensor) == (kind == "sharded")
        return (sharded_cross_entropy if kind == "sharded" else plain_loss)(found, targets, **extra)

    found = train(model, loss_of, part=part, **settings, **({} if total is None else {"total": total}))
    if not is_first:
        return {}
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    return {
        "loss": deviation(found.losses, expected.losses),
        "norm": deviation(found.norms, expected.norms),
        "gradient": max(
            float((found.gradients[name] - gradient).abs().max()) / largest
            for name, gradient in expected.gradients.items()
        ),
        "clipped": max(expected.norms) > 0.5,
        "bitwise": bitwise,
        "names": names == list(initial),
        "dtensors": all(isinstance(value, DTensor) for value in model.parameters()),
        "held": sum(value.to_local().untyped_storage().nbytes() for value in model.parameters()),
        "whole": sum(value.untyped_storage().nbytes() for value in single.parameters()),
    }


def make_on_meta(case: dict[str, Any], meshes: Meshes) -> torch.nn.Module:
    with torch.device("meta"):
        model = make(case)
    shard_tensors(
        model, meshes.tensor, sequence=case.get("sequence", False), loss=case.get("loss") == "sharded"
    )
    assert all(value.is_meta for value in model.parameters())
    return model


@torch.no_grad()
def fill(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        parameter.copy_(distribute_tensor(values[name], parameter.device_mesh, parameter.placements))


def fully(model: torch.nn.Module, meshes: Meshes, kind: str) -> None:
    """Shard every layer, and what is around the layers, with gradients that are sums."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes.fsdp)
    if kind == "fused":
        fully_shard(model.model, mesh=meshes.fsdp, reshard_after_forward=False)
    fully_shard(model, mesh=meshes.fsdp, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def deviation(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
