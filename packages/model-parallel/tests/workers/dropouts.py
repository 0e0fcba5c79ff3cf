"""Notes where ranks draw the same masks of dropout, and where not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoder import Decoder, batches, plain_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import shard_tensors

TOKENS, TARGETS = next(iter(batches(64, 1)))


class Dropped(Decoder):
    """Drops embeddings, what goes into the last layers of attentions and MLPs, and what comes out of them.

    `inside` drops between colwise and rowwise layers, `outside` elsewhere.
    """

    def __init__(self, inside: float = 0.5, outside: float = 0.5) -> None:
        super().__init__()
        self.masks: dict[str, Tensor] = {}
        self._drop("embedding", self.model.embed_tokens, outside)
        for number, layer in enumerate(self.model.layers):
            for name, module in (("attention", layer.self_attn), ("mlp", layer.mlp)):
                last = module.o_proj if name == "attention" else module.down_proj
                self._drop(f"{number} in {name}", last, inside, before=True)
                self._drop(f"{number} behind {name}", module, outside)
            self._drop(f"{number} norm", layer.post_attention_layernorm, outside)

    def _drop(self, name: str, module: nn.Module, share: float, *, before: bool = False) -> None:
        def dropped(x: Tensor) -> Tensor:
            if not module.training or not share:
                return x
            mask = nn.functional.dropout(torch.ones_like(x), share)
            self.masks.setdefault(name, mask.detach() > 0)
            return x * mask

        forward = type(module).forward

        def call(self: nn.Module, x: Tensor) -> Tensor:
            return forward(self, dropped(x)) if before else dropped(forward(self, x))

        kind = type(module)
        module.__class__ = type(f"Dropping{kind.__name__}", (kind,), {"forward": call})


def equal_on_ranks(tensor: Tensor) -> bool:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, tensor.tolist())
    return all(each == told[0] for each in told)


def step(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Loss and all gradients, from one state of the generator."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = plain_loss(model(TOKENS), TARGETS) / (TARGETS != -100).sum()
    loss.backward()
    whole = [
        each.grad.full_tensor() if isinstance(each, DTensor) else each.grad for each in model.parameters()
    ]
    return loss.detach(), torch.cat([each.flatten() for each in whole])


def recomputed(module: nn.Module) -> None:
    """Checkpoint the activations of a module, whatever styles it has."""
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = call


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def masks(mesh: DeviceMesh, sequence: bool) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # ranks that are seeded apart draw alike once they share a model
    made = Dropped()
    torch.manual_seed(100 + dist.get_rank())
    model = shard_tensors(made, mesh, sequence=sequence)
    begun = equal_on_ranks(torch.get_rng_state())
    loss, gradients = step(model)
    bits = {name: mask.flatten()[:500] for name, mask in made.masks.items()}
    equal = {name: equal_on_ranks(mask) for name, mask in bits.items()}
    drawn = list(bits.values())
    found = {
        "begun": begun,
        "alike": sorted(name for name in equal if equal[name]),
        "apart": sorted(name for name in equal if not equal[name]),
        "repeated": sum(torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n]),
        "generators": equal_on_ranks(torch.get_rng_state()),
        "loss": equal_on_ranks(loss),
    }
    for layer in model.model.layers:
        recomputed(layer)
    again, same = step(model)
    found["recomputed"] = torch.equal(loss, again) and torch.equal(gradients, same)
    part = shard_tensors(Dropped(), mesh, sequence=sequence)
    recomputed(part.model.layers[0].mlp)
    found["a part recomputed"] = raised(lambda: step(part))
    return found


def alone(mesh: DeviceMesh, inside: float, outside: float) -> bool:
    """Whether a divided model has the loss of one process, and moves the generator as that does."""
    single = Dropped(inside, outside)
    expected, _ = step(single)
    state = torch.get_rng_state()
    found, _ = step(shard_tensors(Dropped(inside, outside), mesh))
    same = torch.equal(state, torch.get_rng_state())
    return same and abs(float(found - expected)) < 1e-5


def in_a_row(mesh: DeviceMesh) -> list[bool]:
    """Which masks of a model without layers are alike."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5))
    drawn: list[Tensor] = []
    for place in (1, 3):
        model[place].register_forward_hook(lambda module, args, out: drawn.append(out.detach() == 0))
    shard_tensors(model, mesh, {"0": "colwise", "2": "rowwise"})
    torch.manual_seed(3)
    model(torch.ones(4, 32))
    return [equal_on_ranks(mask) for mask in drawn]


def main() -> None:
    with DistributedEnvironment(no_accelerator=True):
        mesh = Meshes(ParallelLayout(tensor=2)).tensor
        notes = {
            "whole": masks(mesh, False),
            "sequence": masks(mesh, True),
            "dropout 0": alone(mesh, 0.0, 0.0),
            "dropout of whole activations": alone(mesh, 0.0, 0.5),
            "in a row": in_a_row(mesh),
        }
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
