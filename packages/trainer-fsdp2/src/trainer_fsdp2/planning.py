"""Memory of a sharded run before anything of it is allocated, and the fastest layout that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_core
from dist_env import ParallelLayout
from trainer_core import ConfigurationError, ModelInit, Plan, Trainer, margin_of

from .arguments import FSDP2Arguments, FSDP2TrainingArguments
from .trainer import FSDP2Trainer

_GIB = 2**30
_MOST_GPUS = 2**13
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def plan(
    model_init: ModelInit,
    args: FSDP2TrainingArguments,
    *,
    world_size: int | ParallelLayout,
    sequence_length: int | None = None,
    batch: Mapping[str, Tensor] | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    passes: bool = True,
) -> Plan:
    """Say what a run will need of memory: `trainer_core.plan` for `FSDP2Trainer`.

    Args:
        model_init: Builds the model, as the trainer is given it.
        args: The settings of the run.
        world_size: Number of ranks; or a layout, instead of that of `args`, which may also give each rank a
            whole copy, as trainer-ddp does.
        sequence_length: Tokens of one example of `input_ids` and `labels`.
        batch: What a rank gets at a time, for models that take something else; only shapes and dtypes count.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.
        passes: As for `trainer_core.plan`.

    Returns:
        The plan of the fullest rank.

    Raises:
        ConfigurationError: If the settings do not fit the ranks or the model, neither batch nor sequence
            length is given, or model or optimizer cannot do without values.
        dist_env.DistributedEnvironmentError: If this process has a process group.

    Example:
        >>> print(plan(model_init, args, world_size=8, sequence_length=4096))  # doctest: +SKIP
    """
    trainer: type[Trainer] = FSDP2Trainer
    whole_copies = False
    if isinstance(world_size, ParallelLayout):
        layout, world_size = world_size, world_size.world_size
        mesh = str(layout) if world_size > 1 else None
        args = replace(args, mesh=mesh, fsdp2=replace(args.fsdp2, replicas=1))
        if whole_copies := not layout.shards_weights and world_size > 1:
            trainer = Trainer
    found = trainer_core.plan(
        args,
        model_init=model_init,
        world_size=world_size,
        sequence_length=sequence_length,
        batch=batch,
        optimizer_factory=optimizer_factory,
        trainer=trainer,
        passes=passes,
    )
    if not whole_copies or layout.replicate == 1:
        return found
    # Buckets of trainer-ddp are there all the time, and those that `Trainer` makes only when they are sent.
    rank = replace(found.fullest, peak=found.peak + found.reduced)
    return replace(found, peak=rank.peak, per_rank=(rank,))


@dataclass(frozen=True)
class Rejected:
    """A layout that would be faster, and why it is not recommended."""

    layout: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The first layout that fits, or what is missing."""

    layout: str
    """The layout in words; if nothing fits, the most memory-efficient one."""
    args: FSDP2TrainingArguments
    """The settings of it; with `uses_ddp`, those for trainer-ddp that both have."""
    plan: Plan
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
        """Whether every GPU, or every group that divides tensors, has a whole copy: that is trainer-ddp's."""
        layout = self.plan.layout
        return layout.world_size > 1 and layout.replicate * layout.tensor == layout.world_size

    def __str__(self) -> str:
        lines = [f"  no   {each.layout}: {each.reason}" for each in self.rejected]
        if not self.fits:
            return "\n".join([*lines, "  does not fit on any number of GPUs: shorten the sequence"])
        lines.append(f"  yes  {self.layout}: {_needs(self.plan.total)}")
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
    tensor: int = 1,
) -> Recommendation:
    """Try layouts from fastest to most memory-efficient, and take the first that fits.

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
        tensor: GPUs that compute each layer together, in every layout that is tried; it is not chosen.

    Raises:
        ConfigurationError: If a number makes no sense, or the model cannot be planned.
    """
    _check(world_size, gpu_memory, gpus_per_node, tensor)
    planner = _Planner(model_init, sequence_length, optimizer_factory, gpu_memory)
    rejected: list[Rejected] = []
    for candidate in _candidates(args, world_size, gpus_per_node, tensor):
        reason = planner.why_not(candidate)
        if reason is None:
            break
        rejected.append(Rejected(candidate.layout, reason))
    fits, needed = reason is None, None
    if fits and candidate.args.fsdp2.cpu_offload:
        needed = _gpus_needed(planner, args, world_size, tensor)
    return Recommendation(
        layout=candidate.layout,
        args=candidate.args,
        plan=planner.plan(candidate),
        fits=fits,
        gpus_needed=needed,
        rejected=tuple(rejected),
    )


class _Planner:
    """Plans of one model for several layouts, of which those that cannot fit are told without a step."""

    def __init__(
        self,
        model_init: ModelInit,
        sequence_length: int,
        optimizer_factory: OptimizerFactory | None,
        gpu_memory: float,
    ) -> None:
        self._model_init = model_init
        self._sequence_length = sequence_length
        self._optimizer_factory = optimizer_factory
        self._gpu_memory = gpu_memory
        self._whole: Plan | None = None
        self._planned: dict[ParallelLayout, dict[str, Plan]] = {}

    def plan(self, candidate: _Candidate) -> Plan:
        """What a layout needs."""
        known = self._planned.setdefault(candidate.mesh, {})
        if candidate.key not in known:
            known[candidate.key] = self._plan(candidate.args, candidate.mesh)
        return known[candidate.key]

    def why_not(self, candidate: _Candidate) -> str | None:
        """Why a layout does not fit; None if it does."""
        mesh, host = candidate.mesh, candidate.args.fsdp2.cpu_offload
        if self._whole is None:
            self._whole = self._plan(_for_ddp(candidate.args), ParallelLayout(), passes=False)
        # The fullest of n ranks has at least an n-th; whole copies sum gradients in buckets as large.
        parts = mesh.shard * mesh.tensor
        least = 0 if host else self._whole.state // parts
        least += self._whole.gradients // parts if mesh.replicate > 1 == mesh.shard else 0
        if (size := least + margin_of(least)) > self._gpu_memory * _GIB:
            return f"{_needs(size)} of {self._gpu_memory:g}, before any activation"
        # How many ranks share the weights changes nothing about activations.
        known = (plans[candidate.key] for plans in self._planned.values() if candidate.key in plans)
        if not host and (other := next(known, None)) is not None:
            least += max(0, other.activations - self._whole.gradients // parts)
            if (size := least + margin_of(least)) > self._gpu_memory * _GIB:
                return f"{_needs(size, 'more than ')} of {self._gpu_memory:g}"
        total = self.plan(candidate).total
        return f"{_needs(total)} of {self._gpu_memory:g}" if total > self._gpu_memory * _GIB else None

    def _plan(self, args: FSDP2TrainingArguments, mesh: ParallelLayout, *, passes: bool = True) -> Plan:
        return plan(
            self._model_init,
            args,
            world_size=mesh,
            sequence_length=self._sequence_length,
            optimizer_factory=self._optimizer_factory,
            passes=passes,
        )


def _check(world_size: int, gpu_memory: float, gpus_per_node: int, tensor: int) -> None:
    numbers = {"world_size": world_size, "gpu_memory": gpu_memory, "gpus_per_node": gpus_per_node}
    numbers["tensor"] = tensor
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigurationError(name, value, "must be above 0", "set it to a positive number")
    if world_size > gpus_per_node and world_size % gpus_per_node:
        rule = f"is not a multiple of the {gpus_per_node} GPUs of a node"
        raise ConfigurationError(
            "world_size", world_size, rule, "use whole nodes, such as a multiple of gpus_per_node"
        )
    node = min(world_size, gpus_per_node)
    if node % tensor:
        raise ConfigurationError(
            "tensor",
            tensor,
            f"does not divide the {node} GPUs of a node, and these ranks wait for one another in every layer",
            "choose a divisor of gpus_per_node, such as 2 or 8",
        )


class _Recomputed(NamedTuple):
    """How many blocks are checkpointed."""

    text: str
    mode: str
    share: float | None = None


_ONE = ParallelLayout()
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
    mesh: ParallelLayout
    key: str
    """What a step does, whatever the number of ranks."""


def _candidates(
    args: FSDP2TrainingArguments, gpus: int, gpus_per_node: int, tensor: int
) -> Iterator[_Candidate]:
    whole, of_node = gpus // tensor, max(1, gpus_per_node // tensor)
    over = f", each layer over {tensor}" if tensor > 1 else ""
    meshes = [
        (f"FSDP over all GPUs{over}" if gpus > 1 else "one GPU", ParallelLayout(shard=whole, tensor=tensor))
    ]
    if gpus > gpus_per_node > tensor:
        nodes = ParallelLayout(replicate=gpus // gpus_per_node, shard=of_node, tensor=tensor)
        meshes.insert(0, (f"HSDP, a copy on each node{over}", nodes))
    if gpus > 1:
        each = f"every {tensor} GPUs" if tensor > 1 else "each GPU"
        mesh = ParallelLayout(replicate=whole, tensor=tensor)
        yield _Candidate(f"DDP, a copy on {each}", _for_ddp(args, mesh), mesh, "DDP")
    batches = list(_halves(args.per_device_train_batch_size))
    levels = [*((level, batches[0]) for level in _LEVELS), *((_ALL, batch) for batch in batches[1:])]
    for level, batch in levels:
        what = level.text + (f", batch {batch}" if batch != batches[0] else "")
        for name, mesh in meshes:
            yield _Candidate(f"{name}{what}", _changed(args, mesh, level, batch), mesh, what)
    for batch in batches:
        name, mesh = meshes[-1]
        what = f"{_ALL.text}, batch {batch}, state on the host"
        changed = _changed(args, mesh, _ALL, batch, cpu_offload=True)
        yield _Candidate(f"{name}{what}", changed, mesh, what)


def _changed(
    args: FSDP2TrainingArguments,
    mesh: ParallelLayout,
    level: _Recomputed,
    batch: int,
    *,
    cpu_offload: bool = False,
) -> FSDP2TrainingArguments:
    return replace(
        args,
        mesh=str(mesh) if mesh.replicate * mesh.tensor > 1 else None,
        fsdp2=replace(args.fsdp2, replicas=1, cpu_offload=cpu_offload),
        per_device_train_batch_size=batch,
        gradient_checkpointing=False,
        activation_checkpointing=level.mode,
        activation_checkpointing_share=level.share,
        activation_checkpointing_every=None,
        activation_checkpointing_operators=None,
    )


def _for_ddp(args: FSDP2TrainingArguments, mesh: ParallelLayout = _ONE) -> FSDP2TrainingArguments:
    """DistributedDataParallel computes in bf16 through autocast."""
    precision = "bf16" if args.fsdp2.param_dtype == "bfloat16" else args.mixed_precision
    named = mesh if mesh.tensor > 1 else _ONE
    plain = _changed(args, named, _NONE, args.per_device_train_batch_size)
    return replace(plain, fsdp2=FSDP2Arguments(), mixed_precision=precision)


def _halves(batch: int) -> Iterator[int]:
    while batch:
        yield batch
        batch //= 2


def _needs(size: int, bound: str = "") -> str:
    return f"needs {bound}{size / _GIB:.1f} GiB"


def _gpus_needed(planner: _Planner, args: FSDP2TrainingArguments, world_size: int, tensor: int) -> int | None:
    """GPUs over which one copy fits with batch 1 and all blocks checkpointed; doubled until it does."""
    gpus = 2 * world_size
    while gpus <= _MOST_GPUS:
        mesh = ParallelLayout(shard=gpus // tensor, tensor=tensor)
        if (
            planner.why_not(_Candidate("", _changed(args, mesh, _ALL, 1), mesh, f"{_ALL.text}, batch 1"))
            is None
        ):
            return gpus
        gpus *= 2
    return None
