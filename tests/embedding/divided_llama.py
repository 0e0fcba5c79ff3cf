"""Trains our Llama on all ranks, divided by model-parallel in a loop by hand, and as one process.

Each rank prints how far they are from each other, as JSON, for each of the cases that it is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from llama_pretrain import Llama, LlamaConfig
from model_parallel import shard_tensors, sharded_cross_entropy, sharded_linear_cross_entropy

STEPS, BATCH, LENGTH = 5, 8, 32


def make(**settings: Any) -> Llama:
    """A model with the same values on each rank, wide enough that its gradients are clipped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.08}
    return Llama(LlamaConfig(**{**sizes, **settings}))


def plain_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets that count, from whole logits."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def sharded_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same from logits that are divided by the vocabulary."""
    return sharded_cross_entropy(model(tokens), targets)


def fused_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same from hidden states, some tokens at a time."""
    hidden = model.model(tokens, None)
    return sharded_linear_cross_entropy(hidden, model.lm_head, targets, chunk_tokens=50)


LOSSES = {"plain": plain_loss, "sharded": sharded_loss, "fused": fused_loss}


def train(model: Llama, loss_of: Callable[..., Tensor]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, with clipping; most targets that do not count are in one row."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    points = []
    for _ in range(STEPS):
        ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH + 1), generator=generator)
        tokens, targets = ids[:, :-1], ids[:, 1:].clone()
        targets[torch.rand(BATCH, LENGTH, generator=generator) < 0.1] = -100
        targets[0, : LENGTH // 2] = -100
        loss = loss_of(model, tokens, targets) / (targets != -100).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        points.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
        optimizer.step()
        optimizer.zero_grad()
    return points


def main(cases: list[dict[str, Any]]) -> None:
    """Run each case."""
    notes = []
    with DistributedEnvironment(no_accelerator=True) as env:
        mesh = Meshes(ParallelLayout(tensor=env.world_size)).tensor
        for case in cases:
            settings, loss = case.get("model", {}), case.get("loss", "plain")
            single, divided = make(**settings), make(**settings)
            shard_tensors(divided, mesh, sequence=case.get("sequence", False), loss=loss == "sharded")
            whole = dict(single.named_parameters())
            values = {name: value.full_tensor() for name, value in divided.named_parameters()}
            equal = values.keys() == whole.keys() and all(map(torch.equal, values.values(), whole.values()))
            expected, found = train(single, plain_loss), train(divided, LOSSES[loss])
            far = [
                max(abs(a[part] - b[part]) / b[part] for a, b in zip(found, expected, strict=True))
                for part in (0, 1)
            ]
            clipped = max(norm for _, norm in expected) > 0.2
            notes.append({"equal": equal, "clipped": clipped, "loss": far[0], "norm": far[1]})
    print(f"notes {json.dumps(notes)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
