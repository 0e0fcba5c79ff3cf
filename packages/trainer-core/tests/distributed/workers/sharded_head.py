"""Each rank trains with a sharded head, and notes how far its gradients are from those of one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_core.loss import CausalLMLoss, FusedLinearCrossEntropy

# Over 4 ranks 8, 8, 8 and 6 rows; over 2 an even 15.
VOCABULARY, FEATURES = 30, 8

IDS = torch.randint(0, VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, 3:] = LABELS[5, 2] = -100
LABELS[1::4] = -100  # on 4 ranks, rank 1 counts nothing


class TinyLM(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=not tied)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(input_ids).cumsum(dim=1))))


Step = tuple[Tensor, dict[str, Tensor]]


def alone(model: nn.Module, options: dict[str, float]) -> Step:
    """The whole batch on one process."""
    loss = CausalLMLoss(**options)
    total = loss(model(IDS), LABELS)
    (total / loss.count(LABELS)).backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def together(model: nn.Module, loss: FusedLinearCrossEntropy, rows: slice) -> Step:
    """Two microbatches of this rank's rows, and the gradients of all ranks."""
    labels, ids = LABELS[rows], IDS[rows]
    total = torch.zeros(())
    for part in (slice(0, 1), slice(1, None)):
        predictions = loss.predict(model, {"input_ids": ids[part]}, labels[part])
        found = loss(predictions, labels[part])
        (found / loss.count(LABELS)).backward()
        total += found.detach()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(parameter, DTensor):
            if not isinstance(gradient, DTensor) or gradient.placements != parameter.placements:
                raise TypeError(f"the gradient of {name} is not sharded like the parameter")
            gradient = gradient.full_tensor()
        gradients[name] = gradient
    with torch.no_grad():
        again = loss(loss.predict(model, {"input_ids": ids}, labels), labels)
    torch.testing.assert_close(again, total)
    return total, gradients


def deviation(expected: Step, found: Step) -> float:
    """The largest, relative to the norm of each gradient."""
    if expected[1].keys() != found[1].keys():
        raise KeyError(f"gradients of {sorted(found[1])}, expected {sorted(expected[1])}")
    pairs = [(expected[0], found[0]), *((e, found[1][n]) for n, e in expected[1].items())]
    return max(float((f - e).norm() / e.norm()) for e, f in pairs)


def summing(model: nn.Module) -> None:
    """Have FSDP2 add gradients up, as the denominator counts the tokens of all ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sharded(
    mesh: DeviceMesh,
    units: Callable[[TinyLM], list[nn.Module]],
    *,
    reshard: bool,
    tied: bool,
    **options: float,
) -> float:
    """FSDP2 over the units and the root."""
    expected = alone(TinyLM(tied=tied), options)
    model = TinyLM(tied=tied)
    for unit in units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    summing(model)
    loss = FusedLinearCrossEntropy(model.head, chunk_tokens=3, **options)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    total, gradients = together(model, loss, rows)
    dist.all_reduce(total)
    return deviation(expected, (total, gradients))


def same_data(mesh: DeviceMesh) -> float:
    """A head spread over ranks that all work on the same data."""
    expected = alone(TinyLM(), {})
    model = TinyLM()
    for name in ("weight", "bias"):
        whole = getattr(model.head, name)
        setattr(model.head, name, nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)])))
    loss = FusedLinearCrossEntropy(model.head, chunk_tokens=5, same_data=("tensor",))
    return deviation(expected, together(model, loss, slice(None)))


def cases(ranks: int) -> Iterator[tuple[str, float]]:
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    yield "head of its own", sharded(flat, lambda m: [m.mix, m.head], reshard=True, tied=False)
    yield "head in the root", sharded(flat, lambda m: [m.mix], reshard=True, tied=False, label_smoothing=0.1)
    yield "not resharded", sharded(flat, lambda m: [m.mix], reshard=False, tied=False)
    yield "tied", sharded(flat, lambda m: [m.mix], reshard=True, tied=True, z_loss=1e-2)
    yield "tied, not resharded", sharded(flat, lambda m: [], reshard=False, tied=True)
    yield "same data", same_data(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)))
    if ranks == 4:
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        yield "hybrid", sharded(hybrid, lambda m: [m.mix, m.head], reshard=True, tied=False)


folder, rank, world = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder / 'meeting'}",
    rank=rank,
    world_size=world,
    timeout=timedelta(seconds=120),
)
(folder / f"notes-{rank}.json").write_text(json.dumps(dict(cases(world))))
dist.destroy_process_group()
