"""Each rank clips the gradients of every case, and notes what came of it.

The reference is one process that has all gradients. Each case is measured again for each of the groups over
which it adds up, with that sum left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_core.distributed.executor import clip_grad_norm_

MAX_NORM = 0.5
FOLDER, RANK, WORLD = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@dataclass
class Case:
    """What one rank has of a model with gradients."""

    whole: list[Tensor]
    """The gradients of the whole model, each once."""
    held: list[tuple[nn.Parameter, int]]
    """The parameters that this rank counts, and which of the whole gradients is that of each."""
    sums: dict[str, ProcessGroup]
    """The groups over which this rank has to add up."""
    copies: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    stages: ProcessGroup | None = None

    def clip(self, max_norm: float | None) -> Tensor:
        return clip_grad_norm_(
            iter([parameter for parameter, _ in self.held]),
            max_norm,
            stages=self.stages,
            counted_elsewhere=(parameter for parameter, _ in self.copies),
        )


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Values of growing size, so that each of them matters to the norm."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * (1 + at / 4) for at, shape in enumerate(shapes)]


def plain(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def placed(gradient: Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    zeros, values = (
        distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        for tensor in (torch.zeros_like(gradient), gradient.clone())
    )
    parameter = nn.Parameter(zeros)
    parameter.grad = values
    return parameter


def partial(
    gradient: Tensor, mesh: DeviceMesh, of_gradient: list[Placement], of_parameter: list[Placement]
) -> nn.Parameter:
    """A parameter whose gradient still has to be added up over some dimensions of the mesh."""
    apart = [dim for dim, placement in enumerate(of_gradient) if placement.is_partial()]
    terms = 2 ** len(apart)
    summands = torch.stack(randoms(*[tuple(gradient.shape)] * terms, seed=9))
    summands[-1] = gradient - summands[:-1].sum(dim=0)
    mine = 0
    for dim in apart:
        mine = 2 * mine + mesh.get_local_rank(dim)
    shown = [Replicate() if placement.is_partial() else placement for placement in of_gradient]
    local = distribute_tensor(summands[mine].clone(), mesh, shown, src_data_rank=None).to_local()
    parameter = placed(torch.zeros_like(gradient), mesh, *of_parameter)
    parameter.grad = DTensor.from_local(
        local, mesh, of_gradient, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )
    return parameter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Two residual blocks; over four ranks rows do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def step(self) -> None:
        ids = torch.arange(12).view(2, 6) % 7
        nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()


def trained(spread: Callable[[Model], None], sums: dict[str, ProcessGroup]) -> Case:
    """A model after a backward pass, spread over the ranks, all of which have the same data."""
    # In float64: these gradients are added up in another order, and must be equal to six digits.
    reference, model = Model().double(), Model().double()
    reference.step()
    spread(model)
    model.step()
    whole = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    return Case(whole, [(parameter, at) for at, parameter in enumerate(model.parameters())], sums)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(model: Model, mesh: DeviceMesh) -> None:
    """The weights of norms are replicated, and each rank has the gradient of its part of the sequence."""
    replicated, rows = Replicate(), Shard(1)
    for block in model.blocks:
        outside = PrepareModuleInputOutput(
            input_layouts=replicated,
            desired_input_layouts=rows,
            output_layouts=rows,
            desired_output_layouts=replicated,
        )
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=rows),
            "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        parallelize_module(block, mesh, outside)


def full_shard(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def two_ranks() -> Iterator[tuple[str, Callable[[], Case]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    group = mesh.get_group()
    stages = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",)).get_group()

    def held(whole: list[Tensor], **options: Any) -> Case:
        return Case(whole, [(placed(g, mesh, Shard(0)), at) for at, g in enumerate(whole)], **options)

    def replicated() -> Case:
        whole = randoms((3, 2), (4,))
        return Case(whole, [(plain(g), at) for at, g in enumerate(whole)], {})

    yield "plain", replicated
    yield "full sharding", lambda: trained(lambda m: full_shard(m, mesh), {"shard": group})
    yield "tensor parallel", lambda: trained(lambda m: tensor_parallel(m, mesh), {"tensor": group})
    yield (
        "sequence parallel",
        lambda: trained(lambda m: sequence_parallel(m, mesh), {"tensor": group}),
    )

    def several_kinds() -> Case:
        """Rows, columns, copies and plain tensors on one mesh: one sum for all that is sharded."""
        whole = randoms((4, 3), (3, 4), (5, 2), (3,))
        placements = [[Shard(0)], [Shard(1)], [Replicate()]]
        made = [placed(g, mesh, *each) for g, each in zip(whole, placements, strict=False)]
        return Case(whole, [*((p, at) for at, p in enumerate(made)), (plain(whole[3]), 3)], {"shard": group})

    yield "rows, columns and copies", several_kinds
    # One row, and one row of two columns: rank 1 has nothing of them.
    yield "uneven", lambda: held(randoms((5, 2), (3,), (1, 4)), sums={"shard": group})
    yield "empty", lambda: held(randoms((1, 4), (1,)), sums={"shard": group})

    def partial_gradients() -> Case:
        whole = randoms((4, 3), (4, 3), (3, 4))
        parameters = [[Replicate()], [Shard(0)], [Shard(1)]]
        made = [
            (partial(g, mesh, [Partial()], of), at)
            for at, (g, of) in enumerate(zip(whole, parameters, strict=True))
        ]
        return Case(whole, made, {"shard": group})

    yield "partial gradients", partial_gradients

    def one_rank_without() -> Case:
        whole = randoms((4, 3), (3,))
        for gradient in whole:
            gradient[2:] = 0  # what rank 1 would have
        case = Case(whole, [(placed(g, mesh, Shard(0)), at) for at, g in enumerate(whole)], {"shard": group})
        if RANK == 1:
            for parameter, _ in case.held:
                parameter.grad = None
        return case

    yield "no gradients on a rank", one_rank_without

    def sixteen_bits() -> Case:
        whole = [gradient.bfloat16() for gradient in randoms((64, 3), (33,))]
        return held([*whole, *randoms((7, 2))], sums={"shard": group})

    yield "16 bits", sixteen_bits
    yield "64 bits", lambda: held([g.double() for g in randoms((7, 2), (5,))], sums={"shard": group})

    def two_stages() -> Case:
        whole = randoms((4, 3), (2, 2), (5,))
        if RANK == 0:
            return Case(whole, [(plain(whole[at]), at) for at in (0, 1)], {"stages": stages}, stages=stages)
        # It holds a copy of the first one, which it may name among its parameters or not.
        own, copy = (plain(whole[2]), 2), (plain(whole[0]), 0)
        return Case(whole, [copy, own], {"stages": stages}, [copy], stages)

    yield "two stages", two_stages

    def empty_stage() -> Case:
        whole = randoms((4, 3))
        mine = [(plain(whole[0]), 0)] if RANK == 1 else []
        return Case(whole, mine, {"stages": stages}, stages=stages)

    yield "a stage without parameters", empty_stage


def four_ranks() -> Iterator[tuple[str, Callable[[], Case]]]:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    groups = {"shard": square.get_group("shard"), "tensor": square.get_group("tensor")}
    strided = (_StridedShard(0, split_factor=2), Shard(0))

    yield "hybrid", lambda: trained(lambda m: full_shard(m, hybrid), {"shard": hybrid.get_group("shard")})

    def both(model: Model) -> None:
        sequence_parallel(model, square["tensor"])
        full_shard(model, square["shard"])
        assert any(isinstance(p, _StridedShard) for p in model.blocks[0].up.weight.placements)

    yield "tensor parallel and full sharding", lambda: trained(both, groups)

    def mixture(order: list[int]) -> Case:
        whole = randoms((6, 4), (4, 5), (4, 4), (3,))
        made = [
            lambda: placed(whole[0], square, *strided),
            lambda: placed(whole[1], square["shard"], Shard(0)),
            lambda: placed(whole[2], square["tensor"], Shard(1)),
            lambda: plain(whole[3]),
        ]
        return Case(whole, [(made[at](), at) for at in order], groups)

    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        yield f"mixture {order}", lambda order=order: mixture(order)

    def uneven() -> Case:
        whole = randoms((5, 2), (3,), (1, 4), (7, 2), (2, 5))
        made = [placed(g, square, *strided) for g in whole[:4]]
        made.append(placed(whole[4], square, Shard(0), Shard(1)))
        return Case(whole, [(p, at) for at, p in enumerate(made)], groups)

    yield "uneven", uneven

    def partial_gradients() -> Case:
        whole = randoms((4, 3), (4, 3), (4, 6))
        layouts: list[tuple[list[Placement], list[Placement]]] = [
            ([Shard(0), Partial()], [Shard(0), Replicate()]),
            ([Partial(), Partial()], [Replicate(), Replicate()]),
            ([Partial(), Shard(1)], [Shard(0), Shard(1)]),
        ]
        made = [
            (partial(g, square, *each), at) for at, (g, each) in enumerate(zip(whole, layouts, strict=True))
        ]
        return Case(whole, made, groups)

    yield "partial gradients", partial_gradients

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    # The ranks in another order, so that groups of one dimension do not look alike.
    experts = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("expert_fsdp", "expert"))
    on_experts = {"expert_fsdp": experts.get_group(0), "expert": experts.get_group(1)}

    def with_experts() -> Case:
        whole = randoms((4, 3, 2), (6, 3), (4, 2))
        made = [
            (placed(whole[2], experts["expert"], Shard(0)), 2),
            (placed(whole[0], experts, Shard(1), Shard(0)), 0),
            (placed(whole[1], flat, Shard(0)), 1),
        ]
        return Case(whole, made, {**on_experts, "fsdp": flat.get_group()})

    yield "experts on a mesh of their own", with_experts

    both_stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stages, shard = both_stages.get_group("pipeline"), both_stages.get_group("shard")

    def two_stages(second_sharded: bool) -> Case:
        whole = randoms((4, 3), (5, 2), (3, 2), (3,))
        mesh = both_stages["shard"]
        sums = {"shard": shard, "stages": stages}
        if both_stages.get_local_rank("pipeline") == 0:
            made = [(placed(whole[at], mesh, Shard(0)), at) for at in (0, 1)]
            return Case(whole, made, sums, stages=stages)
        copy = (placed(whole[0], mesh, Shard(0)), 0)
        if second_sharded:
            own = [(placed(whole[2], mesh, Shard(0)), 2), (plain(whole[3]), 3)]
            return Case(whole, own, sums, [copy], stages)
        own = [(plain(whole[at]), at) for at in (2, 3)]
        return Case(whole, own, {"stages": stages}, [copy], stages)

    yield "two stages of two shards", lambda: two_stages(True)
    yield "two stages of different kinds", lambda: two_stages(False)


@contextmanager
def watched(sums: dict[str, ProcessGroup], without: str | None = None) -> Iterator[list[str]]:
    """Note the groups that sums are taken over, and leave one of them out."""
    names = {group.group_name: name for name, group in sums.items()}
    seen: list[str] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *, group: ProcessGroup) -> None:
        seen.append(names.get(group.group_name, "another group"))
        if seen[-1] != without:
            real(tensor, group=group)

    dist.all_reduce = all_reduce
    try:
        yield seen
    finally:
        dist.all_reduce = real


def deviation(parameter: nn.Parameter, expected: Tensor) -> float:
    """How far a gradient is from this rank's part of the expected one, relative to its largest value."""
    if parameter.grad is None:
        return 0.0
    own = parameter.grad
    if isinstance(own, DTensor):
        if own.placements != parameter.placements:
            return float("inf")
        part = distribute_tensor(expected, own.device_mesh, own.placements, src_data_rank=None)
        own, expected = own.to_local(), part.to_local()
    if own.shape != expected.shape:
        return float("inf")
    difference = (own.double() - expected.double()).abs()
    return (difference.max() / expected.double().abs().max()).item() if own.numel() else 0.0


def measure(build: Callable[[], Case]) -> dict[str, Any]:
    case = build()
    reference = [plain(gradient.double()) for gradient in case.whole]
    expected = nn.utils.clip_grad_norm_(reference, MAX_NORM)
    with watched(case.sums) as seen:
        norm = case.clip(MAX_NORM)
    again = build()
    without, of_ranks = {}, [[""]] * WORLD
    dist.all_gather_object(of_ranks, list(case.sums))
    for left_out in sorted({name for names in of_ranks for name in names}):
        with watched(again.sums, left_out):
            without[left_out] = again.clip(None).item() / expected.item()
    return {
        "norm": norm.item() / expected.item(),
        "before": expected.item(),
        "dtype": str(norm.dtype),
        "expected dtype": str(max((torch.float32, *(g.dtype for g in case.whole)), key=lambda d: d.itemsize)),
        "gradients": [
            deviation(parameter, reference[at].grad) for parameter, at in [*case.held, *case.copies]
        ],
        "sums": seen,
        "expected sums": list(case.sums),
        "without": {name: value for name, value in without.items() if name in case.sums},
    }


dist.init_process_group(
    "gloo",
    init_method=f"file://{FOLDER / 'meeting'}",
    rank=RANK,
    world_size=WORLD,
    timeout=timedelta(seconds=120),
)
cases = two_ranks() if WORLD == 2 else four_ranks()
notes = {name: measure(build) for name, build in cases}
(FOLDER / f"notes-{RANK}.json").write_text(json.dumps(notes))
dist.destroy_process_group()
