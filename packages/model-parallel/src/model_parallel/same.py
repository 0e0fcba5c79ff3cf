"""Whether the ranks that divide a model give it the same batches, and draw the same random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .draws import generator_of
from .plan import PlanError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_inputs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have a divided model compare what its ranks give it, in its forward passes 1, 2, 4, 8 and so on.

    Unlike batches would give wrong gradients without an error: each rank computes a part of the layers. To
    compare is an all-gather of 24 bytes and a wait for the device, so it is done ever more seldom.
    """
    passes = 0

    # A function, for a copy of the model copies its hooks, and a mesh cannot be copied.
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passes
        if torch.compiler.is_compiling():
            return
        passes += 1
        if passes & (passes - 1):
            return
        given = dict(_tensors((args, kwargs), ""))
        if any(isinstance(each, FakeTensor) or each.is_meta for each in given.values()):
            return
        _compare(given, module.training, mesh, passes)

    model.register_forward_pre_hook(compare, with_kwargs=True)


def check_same(facts: object, mesh: DeviceMesh, *, refused: str, differs: str) -> None:
    """Refuse to divide a model where ranks were given different things; collective.

    Args:
        facts: What must be the same, with a `repr` that tells; None on a rank that refuses for itself.
        mesh: The ranks.
        refused: Begins the sentence that the others raise then.
        differs: What the others have, in a sentence behind their numbers.

    Raises:
        PlanError: On every rank, but those that refuse for themselves.
    """
    digest = 0
    if facts is not None:
        digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big") | 1
    mine = torch.tensor([digest], device=mesh.device_type)
    told = [torch.zeros_like(mine) for _ in range(mesh.size())]
    dist.all_gather(told, mine, group=mesh.get_group())
    digests = [int(each) for each in told]
    if digest == 0 or len(set(digests)) == 1:
        return
    if none := [rank for rank, each in enumerate(digests) if each == 0]:
        raise PlanError(f"{refused} on rank(s) {listed(none)} of the mesh. See the error there.")
    other = [rank for rank, each in enumerate(digests) if each != digests[0]]
    raise PlanError(f"Rank(s) {listed(other)} of the mesh {differs} than rank 0. Give all ranks the same.")


def listed(ranks: Sequence[int]) -> str:
    """Ranks as in a sentence."""
    return ", ".join(map(str, ranks))


def _compare(given: Mapping[str, Tensor], training: bool, mesh: DeviceMesh, number: int) -> None:
    facts = repr([(name, list(each.shape), str(each.dtype)) for name, each in given.items()])
    whole = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
    mine = torch.zeros(3, dtype=torch.int64, device=mesh.device_type)
    mine[0] = whole
    for place, each in enumerate(given.values(), start=1):
        mine[1] += (place * _checksum(each)).to(mine.device)
    generator = generator_of(mesh.device_type) if training else None
    if generator is not None:
        mine[2] = _checksum(generator.get_state())
    told = [torch.zeros_like(mine) for _ in range(mesh.size())]
    dist.all_gather(told, mine, group=mesh.get_group())
    shapes, values, draws = zip(*(each.tolist() for each in told), strict=True)
    batches = list(zip(shapes, values, strict=True))
    if other := [rank for rank, each in enumerate(batches) if each != batches[0]]:
        raise ValueError(
            f"In forward pass {number} rank(s) {listed(other)} of the mesh gave the model another batch than "
            "rank 0, and all of them compute one batch together. In the job these ranks are "
            f"{_globally(mesh)}. Give them the same batches, in the same order: divide data by the ranks of "
            "other dimensions only, such as dist_env.ParallelLayout.data_rank(rank)."
        )
    if other := [rank for rank, each in enumerate(draws) if each != draws[0]]:
        raise ValueError(
            f"In forward pass {number} the random generator of rank(s) {listed(other)} of the mesh is in "
            "another state than that of rank 0, so that masks of dropout on activations that each rank has "
            f"whole would differ. In the job these ranks are {_globally(mesh)}. Draw as many random numbers "
            "on each of them, or from generators of your own, such as torch.Generator().manual_seed(rank)."
        )


def _globally(mesh: DeviceMesh) -> str:
    return listed(dist.get_process_group_ranks(mesh.get_group()))


def _checksum(x: Tensor) -> Tensor:
    """A number for the bits of a tensor and their places; it is not read yet."""
    x = x.detach()
    flat = (torch.view_as_real(x) if x.is_complex() else x).contiguous().reshape(-1)
    bits = flat.view(_WHOLE[flat.element_size()]).to(torch.int64)
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * 0x9E3779B1
    return (bits * weights).sum()


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not isinstance(value, DTensor) and value.layout is torch.strided:
            yield name, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for place, each in enumerate(value):
            yield from _tensors(each, f"{name}.{place}")
