"""One rank that measures its state after a step: `state_of_ranks.py RANK RANKS FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import VOCABULARY, Tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from trainer_core import CausalLMLoss
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments, plan

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of what this rank holds."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def measured(ranks: int, make: Make, param_dtype: torch.dtype | None) -> list[int]:
    """Bytes of parameters, gradients, optimizer state and saved activations of this rank after one step."""
    model = Tiny()
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(VOCABULARY, (2, 6))
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in {local(p).untyped_storage().data_ptr() for p in model.parameters()}:
            kept[place] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = CausalLMLoss()(model(ids), ids)
    saved = sum(size for size, _ in kept.values())
    loss.backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimized = size_of(value for value in state if isinstance(value, Tensor))
    return [size_of(parameters), size_of(gradients), optimized, saved]


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """One value per weight."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def planned(ranks: int, make: Make | None, param_dtype: str | None) -> dict[str, object]:
    """What the plan says."""
    args = FSDP2TrainingArguments(
        per_device_train_batch_size=2, fsdp2=FSDP2Arguments(param_dtype=param_dtype)
    )
    factory = None if make is None else lambda named: make([p for _, p in named if p.requires_grad])
    found = plan(Tiny, args, world_size=ranks, sequence_length=6, optimizer_factory=factory)
    return found.to_json()


def main(rank: int, ranks: int, folder: Path) -> None:
    """Measure and plan each case, and write both down."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    cases = {
        "AdamW": (measured(ranks, AdamW, None), planned(ranks, None, None)),
        "bf16": (measured(ranks, AdamW, torch.bfloat16), planned(ranks, None, "bfloat16")),
        "SGD": (measured(ranks, momentum, None), planned(ranks, momentum, None)),
    }
    notes = {name: {"measured": sizes, "planned": said} for name, (sizes, said) in cases.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
