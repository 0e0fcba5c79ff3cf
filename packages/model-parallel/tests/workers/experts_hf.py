"""Divides the experts of tiny models of transformers, and notes how far each is from one process."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts import far, raised
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import divide_experts, shard_tensors, tensor_plan

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 8}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**MOE, "norm_topk_prob": True, "head_dim": 8},
    ),  # all sparse
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**MOE, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
}


def make(family: str, implementation: str, **settings: Any) -> nn.Module:
    config, model, own = FAMILIES[family]
    torch.manual_seed(0)
    made: nn.Module = model(
        config(
            **{**SIZES, **own, **settings},
            attn_implementation="eager",
            experts_implementation=implementation,
        )
    )
    assert made.config._experts_implementation == implementation
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2)  # the routers differ clearly between experts
    return made.train()


def ids_of(rank: int, length: int) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), logits


def compared(
    model: nn.Module, single: nn.Module, batches: list[Tensor], own: Tensor, summed: bool
) -> dict[str, float]:
    losses = [loss_of(single, ids) for ids in batches]
    torch.stack([loss for loss, _ in losses]).sum().backward()
    loss, logits = loss_of(model, own)
    loss.backward()
    place = next(number for number, ids in enumerate(batches) if torch.equal(ids, own))
    notes = {"loss": far(loss.detach(), losses[place][0]), "logits": far(logits.detach(), losses[place][1])}
    expected = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and summed and not isinstance(gradient, DTensor):
            dist.all_reduce(gradient)
        wanted = expected[name].grad
        notes[name] = far(gradient, torch.zeros_like(expected[name]) if wanted is None else wanted)
    return notes


def main(cases: list[list[Any]]) -> None:
    notes: list[Any] = []
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes = Meshes(ParallelLayout(tensor=env.world_size, expert=env.world_size))
        assert meshes.expert is not None
        batches = [ids_of(rank, 6 + 3 * rank) for rank in range(env.world_size)]
        for family, implementation, kind in cases:
            start = time.monotonic()
            single, model = make(family, implementation), make(family, implementation)
            if kind == "alone":
                divide_experts(model, meshes.expert)
                found = compared(model, single, batches, batches[env.rank], summed=True)
            else:
                divide_experts(model, meshes.expert, same_tokens=meshes.tensor)
                assert all("experts" not in rule for rule in tensor_plan(model)), tensor_plan(model)
                shard_tensors(model, meshes.tensor, sequence=kind == "sequence")
                found = compared(model, single, [ids_of(0, 8)], ids_of(0, 8), summed=False)
            notes.append({**found, "seconds": time.monotonic() - start})
        undivided = make("mixtral", "eager")
        notes.append(raised(lambda: shard_tensors(undivided, meshes.tensor)))
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
