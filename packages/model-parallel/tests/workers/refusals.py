"""Notes what each rank raises, and after how many seconds, for input that cannot be used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoder import Decoder, RMSNorm
from torch.distributed.device_mesh import DeviceMesh

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import shard_tensors, sharded_cross_entropy, sharded_linear_cross_entropy


class Early(Decoder):
    """Norms its embeddings, with a norm that the plan does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.model.early = RMSNorm(32)
        self.model.embed_tokens.register_forward_hook(lambda module, args, out: self.model.early(out))


def main() -> None:
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes = Meshes(ParallelLayout(tensor=2))
        mesh, other = meshes.tensor, env.rank == 1
        notes = {}
        for name, act in cases(meshes.mesh, mesh, other).items():
            start = time.monotonic()
            try:
                act()
                notes[name] = ("nothing", "", 0.0)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
                notes[name] = (type(error).__name__, str(error), time.monotonic() - start)
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


def cases(whole: DeviceMesh, mesh: DeviceMesh, other: bool) -> dict[str, Callable[[], Any]]:
    plan = Decoder().tp_plan
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    divided = shard_tensors(Decoder(), mesh, loss=True)
    by_sequence = shard_tensors(Decoder(), mesh, sequence=True)
    shorter, fresh, second = (shard_tensors(Decoder(), mesh) for _ in range(3))
    second(tokens)
    logits, hidden, head = divided(tokens), divided.model(tokens), divided.lm_head
    return {
        "bad on each rank": lambda: shard_tensors(Decoder(width=48, heads=3, kv_heads=3), mesh),
        "bad on one": lambda: shard_tensors(
            Decoder(), mesh, {**plan, "lm_head": "columns"} if other else plan
        ),
        "another plan on one": lambda: shard_tensors(
            Decoder(), mesh, {**plan, "model.norm": "replicate"} if other else plan
        ),
        "another setting on one": lambda: shard_tensors(Decoder(), mesh, sequence=other),
        "divided already": lambda: shard_tensors(divided, mesh, plan),
        "two dimensions": lambda: shard_tensors(Decoder(), whole["shard", "tensor"]),
        "a sequence that is not a multiple": lambda: by_sequence(tokens[:, :3]),
        "whole logits": lambda: sharded_cross_entropy(torch.zeros(2, 4, 64), tokens),
        "a head that is not divided": lambda: sharded_linear_cross_entropy(
            hidden, torch.nn.Linear(32, 64), tokens
        ),
        "targets of another shape": lambda: sharded_linear_cross_entropy(hidden, head, tokens[:, 1:]),
        "a target outside": lambda: sharded_cross_entropy(logits, tokens + 64),
        "a token outside": lambda: divided(tokens + 64),
        "label smoothing": lambda: sharded_cross_entropy(logits, tokens, label_smoothing=2.0),
        "another batch": lambda: second(tokens + other),
        "another batch later": lambda: [shorter(tokens[:, : 4 - (other and n == 3)]) for n in range(4)],
        "other draws": lambda: [torch.rand(1 + other), fresh(tokens)],
        "an early norm": lambda: shard_tensors(Early(), mesh, sequence=True)(tokens),
    }


if __name__ == "__main__":
    main()
