"""Looks for the layout that costs the least time among those that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trainer_core import ConfigurationError, ModelInit

from ..arguments import FSDP2Arguments, FSDP2TrainingArguments
from .memory_plan import GIB, MemoryPlan
from .mesh import Mesh
from .planner import Planner
from .state import OptimizerFactory

_MOST_GPUS = 2**13


@dataclass(frozen=True)
class Rejected:
    """A layout that would be faster, and why it is not recommended."""

    layout: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The first layout that fits, or what is missing."""

    layout: str
    """The layout in words; if nothing fits, the most frugal one."""
    args: FSDP2TrainingArguments
    """The settings of it; with `uses_ddp`, those for trainer-ddp that both have."""
    plan: MemoryPlan
    """Its memory."""
    fits: bool
    """Whether it fits."""
    gpus_needed: int | None = None
    """Where state must rest on the host: GPUs on which it need not. None elsewhere, and if no number of GPUs
    is enough."""
    rejected: tuple[Rejected, ...] = field(default=())
    """What was tried before, in order."""

    @property
    def uses_ddp(self) -> bool:
        """Whether every GPU has a whole copy, which is trainer-ddp's business."""
        return self.plan.mesh.shards == 1 and self.plan.mesh.replicas > 1

    def __str__(self) -> str:
        lines = [f"  no   {each.layout}: {each.reason}" for each in self.rejected]
        if not self.fits:
            return "\n".join([*lines, "  does not fit on any number of GPUs: shorten the sequence"])
        lines.append(f"  yes  {self.layout}: {_needs(self.plan)}")
        if self.gpus_needed is not None:
            lines.append(f"  or   {self.gpus_needed} GPUs, without state on the host")
        return "\n".join(lines)


def recommend(
    model_init: ModelInit,
    args: FSDP2TrainingArguments,
    *,
    world_size: int,
    gpu_memory: float,
    gpus_per_node: int = 8,
    sequence_length: int,
    optimizer_factory: OptimizerFactory | None = None,
) -> Recommendation:
    """Walk from the fastest layout to the most frugal one, and take the first that fits.

    In this order, after the reports of IBM and Meta on FSDP (PyTorch blog, 2024): a whole copy on each GPU;
    then, without activation checkpointing, with a third of the blocks, half of them, and all of them
    checkpointed: first a copy on each node, so that weights travel inside nodes only (HSDP), then one copy
    over all GPUs (FSDP); then smaller batches; then state in the memory of the host.

    It chooses mesh, activation checkpointing, batch size (at most that of `args`) and cpu_offload; the
    other settings are those of `args`.

    Args:
        model_init: Builds the model, as the trainer is given it.
        args: Settings of the run.
        world_size: Number of GPUs.
        gpu_memory: Memory of one GPU in GiB.
        gpus_per_node: GPUs of one node.
        sequence_length: Tokens of one example.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.

    Raises:
        ConfigurationError: If a number makes no sense, or the model cannot be planned.
    """
    _check(world_size, gpu_memory, gpus_per_node)
    planner = Planner(model_init, sequence_length=sequence_length, optimizer_factory=optimizer_factory)
    rejected: list[Rejected] = []
    for candidate in _candidates(args, world_size, gpus_per_node):
        reason = _why_not(planner, candidate, gpu_memory)
        if reason is None:
            break
        rejected.append(Rejected(candidate.layout, reason))
    fits, needed = reason is None, None
    if fits and candidate.args.fsdp2.cpu_offload:
        needed = _gpus_needed(planner, args, gpu_memory, world_size)
    return Recommendation(
        layout=candidate.layout,
        args=candidate.args,
        plan=planner.plan(candidate.args, candidate.mesh),
        fits=fits,
        gpus_needed=needed,
        rejected=tuple(rejected),
    )


def _check(world_size: int, gpu_memory: float, gpus_per_node: int) -> None:
    numbers = {"world_size": world_size, "gpu_memory": gpu_memory, "gpus_per_node": gpus_per_node}
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigurationError(name, value, "must be above 0", "raise it")
    if world_size > gpus_per_node and world_size % gpus_per_node:
        rule = f"is no multiple of the {gpus_per_node} GPUs of a node"
        raise ConfigurationError("world_size", world_size, rule, "use whole nodes")


class _Recomputed(NamedTuple):
    """How many blocks are checkpointed."""

    text: str
    mode: str
    share: float | None = None


_NONE, _ALL = _Recomputed("", "no"), _Recomputed(", all blocks checkpointed", "full")
_LEVELS = (
    _NONE,
    _Recomputed(", a third of the blocks checkpointed", "share", 1 / 3),
    _Recomputed(", half of the blocks checkpointed", "share", 1 / 2),
    _ALL,
)


class _Candidate(NamedTuple):
    layout: str
    args: FSDP2TrainingArguments
    mesh: Mesh


def _candidates(args: FSDP2TrainingArguments, gpus: int, gpus_per_node: int) -> Iterator[_Candidate]:
    meshes = [("FSDP over all GPUs" if gpus > 1 else "one GPU", Mesh(gpus))]
    if gpus > gpus_per_node > 1:
        meshes.insert(0, ("HSDP, a copy on each node", Mesh(gpus_per_node, gpus // gpus_per_node)))
    if gpus > 1:
        yield _Candidate("DDP, a copy on each GPU", _for_ddp(args), Mesh(1, gpus))
    for level in _LEVELS:
        for name, mesh in meshes:
            yield _Candidate(f"{name}{level.text}", _changed(args, mesh, level), mesh)
    batches = list(_halves(args.per_device_train_batch_size))
    for batch in batches[1:]:
        for name, mesh in meshes:
            layout = f"{name}{_ALL.text}, batch {batch}"
            yield _Candidate(layout, _changed(args, mesh, _ALL, batch), mesh)
    for batch in batches:
        name, mesh = meshes[-1]
        layout = f"{name}{_ALL.text}, batch {batch}, state on the host"
        yield _Candidate(layout, _changed(args, mesh, _ALL, batch, cpu_offload=True), mesh)


def _changed(
    args: FSDP2TrainingArguments,
    mesh: Mesh,
    level: _Recomputed,
    batch: int | None = None,
    *,
    cpu_offload: bool = False,
) -> FSDP2TrainingArguments:
    return replace(
        args,
        mesh=f"dp={mesh.replicas},shard={mesh.shards}" if mesh.replicas > 1 else None,
        fsdp2=replace(args.fsdp2, replicas=1, cpu_offload=cpu_offload),
        per_device_train_batch_size=batch or args.per_device_train_batch_size,
        gradient_checkpointing=False,
        activation_checkpointing=level.mode,
        activation_checkpointing_share=level.share,
        activation_checkpointing_every=None,
        activation_checkpointing_operators=None,
    )


def _for_ddp(args: FSDP2TrainingArguments) -> FSDP2TrainingArguments:
    """DistributedDataParallel computes in bf16 through autocast."""
    precision = "bf16" if args.fsdp2.param_dtype == "bfloat16" else args.mixed_precision
    plain = _changed(args, Mesh(1), _NONE)
    return replace(plain, fsdp2=FSDP2Arguments(), mixed_precision=precision)


def _halves(batch: int) -> Iterator[int]:
    while batch:
        yield batch
        batch //= 2


def _why_not(planner: Planner, candidate: _Candidate, gpu_memory: float) -> str | None:
    """Why a candidate does not fit; None if it does."""
    least = planner.least(candidate.args, candidate.mesh)
    if least > gpu_memory * GIB:
        return f"needs {least / GIB:.1f} GiB of {gpu_memory:g}, before any activation"
    planned = planner.plan(candidate.args, candidate.mesh, ranks=1)
    return f"{_needs(planned)} of {gpu_memory:g}" if planned.total > gpu_memory * GIB else None


def _needs(planned: MemoryPlan) -> str:
    return f"needs {planned.total / GIB:.1f} GiB"


def _gpus_needed(
    planner: Planner, args: FSDP2TrainingArguments, gpu_memory: float, world_size: int
) -> int | None:
    """GPUs over which one copy fits with batch 1 and all blocks checkpointed; doubled until it does."""
    gpus = 2 * world_size
    while gpus <= _MOST_GPUS:
        mesh = Mesh(gpus)
        if _why_not(planner, _Candidate("", _changed(args, mesh, _ALL, 1), mesh), gpu_memory) is None:
            return gpus
        gpus *= 2
    return None
