"""Weights, gradients and optimizer state divided among ranks, by torch's `fully_shard`.

What `fully_shard` needs takes seconds to import, so it is imported where something is sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dist_env import ParallelLayout, get_logger
from trainer_core import (
    BuiltModel,
    ConfigurationError,
    GradSync,
    ModelTransform,
    Ranks,
    StepHooks,
    TrainingArguments,
    fsdp_modules,
    generators_of_rank_0,
    logits_of_one_rank,
    ordinary_tensors,
    use_sum_reduction,
)

from .arguments import FSDP2Arguments, check_beside
from .units import Unit, refuse_unshardable, units_of
from .unused import UnusedParameters, drop_unsummed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

logger = get_logger(__name__)


class FullyShard(ModelTransform):
    """Each rank of the dimension `shard` holds a part of each weight, and gathers a layer to compute with it.

    Replicas of the sharded model, the dimension `replicate`, sum their gradients (HSDP). In a pipeline each
    stage is sharded over the ranks that have it. With one rank nothing is sharded, unless param_dtype or
    cpu_offload ask for it.

    Args:
        settings: What `fully_shard` is told; those of the arguments if they have them, else the defaults.
    """

    axis: ClassVar[str] = "shard"

    def __init__(self, settings: FSDP2Arguments | None = None) -> None:
        self._settings = settings
        self._is_sharded = False
        self._names_layers = False

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Self:
        """The transform with the settings that the arguments have for it."""
        return cls(_settings_in(args))

    @property
    def settings(self) -> FSDP2Arguments:
        """What `fully_shard` is told."""
        return self._settings or FSDP2Arguments()

    def is_active(self, layout: ParallelLayout) -> bool:
        """With several ranks to share the weights, or where only it can do what is asked."""
        return self._shards(layout) or self._names_layers

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse what does not go with sharding, or does not fit the ranks.

        Raises:
            ConfigurationError: Naming the setting.
        """
        self._settings = self._settings or _settings_in(args)
        layout = ranks.layout
        check_beside(args, self.settings)
        if layout.replicate > 1 and not layout.shards_weights:
            raise ConfigurationError(
                "mesh",
                str(layout),
                f"leaves nothing to shard on {ranks.env.world_size} ranks",
                "use trainer-ddp, or give some of them to the dimension shard",
            )
        self._is_sharded = self._shards(layout)
        self._names_layers = bool(self.settings.layer_classes or args.transformer_layers_path)
        # Without it only the layers that were named are looked for, in a model that is whole.
        self.keeps_parameters = not self._is_sharded
        if self._is_sharded:
            resharding(self.settings.reshard_after_forward, layout.shard * layout.context)

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What sharding keeps whole."""
        waits = args.gradient_accumulation_steps > 1 and not self.settings.reduce_each_microbatch
        told = {
            "mixed_precision keeps a cast of every weight from forward to backward, with the activations; "
            "fsdp2.param_dtype='bfloat16' computes in bf16 without them": args.autocast_dtype is not None,
            "gradient_accumulation_steps above 1 keeps whole gradients on every rank until the last "
            "microbatch; fsdp2.reduce_each_microbatch adds them up at once": waits,
        }
        return [note for note, applies in told.items() if applies and self._shards(layout)]

    def before_conversion(self, built: BuiltModel) -> None:
        """FP8 layers whose weights are gathered in float8 are converted for it."""
        built.gathers_fp8 = self.settings.fp8_all_gather

    def apply(self, built: BuiltModel) -> None:
        """Shard the model, or each stage of it, in place; parameters become DTensors of the same names.

        Raises:
            ConfigurationError: If the model cannot be sharded as the settings say.
        """
        args, settings = built.args, self.settings
        # They need not be part of the arguments, which are compared.
        built.ranks.check_same({"fsdp2": asdict(settings)})
        if not self._is_sharded:
            units_of(built.model, settings, args.transformer_layers_path)
            return
        from .policy import dtype_table, precision_policy

        refuse_unshardable(built.model)
        units = units_of(built.model, settings, args.transformer_layers_path)
        mesh, expert_mesh = _meshes(built.ranks)
        in_stages = built.parts != [built.model]
        if in_stages:
            _refuse_shared_between_stages(built.parts)
        places = _places(built.model) if in_stages else {}
        for part in built.parts:
            inside = set(part.modules())
            # In a dry run with ordinary tensors too: the pieces of hundreds of ranks would take it long.
            with ordinary_tensors():
                shard(
                    part,
                    [unit for unit in units if unit[1] in inside and unit[1] is not part],
                    mesh,
                    settings,
                    built.ranks.device,
                    stays_gathered=in_stages,
                    experts=[each for each in built.experts if each in inside],
                    expert_mesh=expert_mesh,
                )
        _tie_again(places)
        if settings.cpu_offload:
            built.weights_device = torch.device("cpu")
        if args.autocast_dtype is None and settings.param_dtype == "bfloat16":
            built.matmul_dtype = "bf16"
        unused = _unused_parameters(built, expert_mesh)
        built.grad_sync = sync = _ShardSync(built.parts, settings, in_stages, unused)
        built.hooks.append(_ShardHooks(built, sync, settings))
        logger.info(
            "sharded %d units and the root over %s ranks\n%s",
            len(units),
            " x ".join(map(str, mesh.shape)),
            dtype_table(built.model, precision_policy(settings), args.mixed_precision),
        )

    def _shards(self, layout: ParallelLayout) -> bool:
        asks = self.settings.param_dtype is not None or self.settings.cpu_offload
        return layout.shards_weights or (asks and layout.replicate == 1)


def shard(
    part: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    settings: FSDP2Arguments,
    device: torch.device,
    *,
    stays_gathered: bool,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Divide a model, or a stage of one, among ranks, in place; parameters become DTensors of the same names.

    Gradients are added up over the ranks, not averaged: the loss is divided by the tokens of all ranks.

    Args:
        part: What is called; its parameters may be on the meta device.
        units: What is gathered and dropped by itself.
        mesh: One dimension, or (replicas, shards) for hybrid sharding.
        settings: How.
        device: Where this rank computes.
        stays_gathered: Whether weights stay from the first microbatch of a step to the last: all those of a
            pipeline need them, and are under way at the same time.
        experts: Modules in units whose parameters are DTensors of the dimension `expert`.
        expert_mesh: As `mesh`, for these.

    Raises:
        ConfigurationError: If reshard_after_forward is a number that does not fit the ranks, or weights of
            experts cannot be shared out evenly.
    """
    from torch.distributed.fsdp import fully_shard

    from .float8 import gather_float8
    from .policy import offload_policy, precision_policy

    policy, offload = precision_policy(settings), offload_policy(settings, device)
    reshard = resharding(settings.reshard_after_forward, mesh.shape[-1])
    if stays_gathered and reshard is True:
        reshard = False
    if expert_mesh is not None:
        ranks = expert_mesh.shape[-1]
        # A number is about the ranks of other weights: where it is not a part of these, all is dropped.
        fits = isinstance(reshard, bool) or (reshard < ranks and ranks % reshard == 0)
        # The layer has cast hidden states; weights of the choice stay as the router computes them.
        of_experts = replace(policy, cast_forward_inputs=False)
        for module in experts:
            fully_shard(
                module,
                mesh=expert_mesh,
                reshard_after_forward=reshard if fits else True,
                shard_placement_fn=_dimension_of(module, ranks),
                mp_policy=of_experts,
                offload_policy=offload,
            )
    sharded = [
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
        )
        for _, module in units
    ]
    # The backward pass begins with the root, so its weights stay where they are until then.
    fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    use_sum_reduction(part)
    if settings.fp8_all_gather:
        gather_float8(part, mesh)
    if settings.prefetch_depth is not None:
        _prefetch(sharded, settings.prefetch_depth)


class _ShardSync(GradSync):
    """Sends gradients with the last microbatch of a step, or with each; keeps weights as long as needed."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        settings: FSDP2Arguments,
        in_stages: bool,
        unused: Sequence[UnusedParameters],
    ) -> None:
        self.units: dict[nn.Module, list[FSDPModule]] = {part: fsdp_modules(part) for part in parts}
        self._settings = settings
        self._in_stages = in_stages
        self._unused = unused
        self._was_last: dict[nn.Module, bool] = {}
        self._is_under_way = False

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        """Say what the next backward pass does with gradients, and with gathered weights."""
        self._is_under_way = True
        if self._was_last.get(part) is last:
            return
        self._was_last[part] = last
        settings = self._settings
        keeps_weights = not last and (self._in_stages or settings.reshard_after_forward is False)
        for unit in self.units[part]:
            if self._in_stages:
                # Microbatches overlap: what torch does at the end of a backward pass waits for the last one.
                unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or settings.reduce_each_microbatch, recurse=False)
            unit.set_reshard_after_backward(not keeps_weights, recurse=False)

    def finish(self) -> None:
        """Drop the gradients of parameters that no rank has used."""
        self._is_under_way = False
        for each in self._unused:
            each.drop()

    def forget(self) -> None:
        """Forget a step that was left in the middle, whose gradients have not come to the parameters yet."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        for units in self.units.values():
            for root in units[:1]:
                if callable(reset := getattr(root, "reset_iter_state", None)):  # torch 2.13 and later
                    reset()
            for unit in units:
                drop_unsummed(unit)

    def drop_gathered(self) -> None:
        """Let go of gathered weights, so that parameters are this rank's shards again."""
        for units in self.units.values():
            for unit in units:
                unit.reshard()


class _ShardHooks(StepHooks):
    def __init__(self, built: BuiltModel, sync: _ShardSync, settings: FSDP2Arguments) -> None:
        self._built = built
        self._sync = sync
        self._scales_float8 = settings.fp8_all_gather

    def begin(self, step: int) -> None:
        """Begin without what is left of a step that an error has ended."""
        self._sync.forget()

    def after_step(self, step: int) -> None:
        """Find the scales of weights that are gathered in float8 again, for all layers at once."""
        if self._scales_float8:
            from .float8 import scale_float8

            for part in self._built.parts:
                scale_float8(part)

    @contextmanager
    def synced_weights(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which each rank holds no more than its shards."""
        self._sync.drop_gathered()
        try:
            yield
        finally:
            self._sync.drop_gathered()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all ranks have the random generators of rank 0, and its logits at every call.

        Ranks that draw alike from the same logits end at the same token, so that none waits for the others.
        """
        built = self._built
        try:
            with (
                generators_of_rank_0(built.ranks.env),
                logits_of_one_rank(built.model, built.ranks.data_group),
            ):
                yield
        finally:
            self._sync.drop_gathered()


def _settings_in(args: TrainingArguments) -> FSDP2Arguments:
    found = getattr(args, "fsdp2", None)
    return found if isinstance(found, FSDP2Arguments) else FSDP2Arguments()


def _dimension_of(experts: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard]:
    """By which dimension the weights of one rank's experts are shared out: as evenly as torch asks for.

    Raises:
        ConfigurationError: If none can be.
    """
    from torch.distributed.tensor import Shard

    count = experts.num_experts
    if not isinstance(count, int):
        raise TypeError(
            f"num_experts={count!r} of {type(experts).__name__} must be a whole number, how many experts the "
            "module holds. Set it in its __init__, as in self.num_experts = 8."
        )
    found: dict[nn.Parameter, int] = {}
    for name, parameter in experts.named_parameters():
        # By experts, or by what each of them has: torch shares out other dimensions than the first evenly.
        sizes = (count, *parameter.shape[1:])
        fitting = [dimension for dimension, size in enumerate(sizes) if size % ranks == 0]
        if not fitting:
            raise ConfigurationError(
                "mesh",
                f"{ranks} ranks with the same experts",
                f"cannot share out {name} of the shape {list(sizes)} evenly",
                "choose a larger ep",
            )
        found[parameter] = fitting[0]
    return lambda parameter: Shard(found[parameter])


def _meshes(ranks: Ranks) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks that share the weights, with replicas (replicas, shards); and those that share experts."""
    if ranks.meshes is None:
        raise ConfigurationError(
            "world_size",
            ranks.env.world_size,
            "needs a process group, even for a single rank, but there is none",
            "open a dist_env.DistributedEnvironment first and pass it as distributed_env",
        )
    meshes = ranks.meshes
    if meshes.hsdp is None:
        return meshes.fsdp, meshes.expert_fsdp
    return meshes.hsdp, meshes.expert_hsdp


def _unused_parameters(built: BuiltModel, expert_mesh: DeviceMesh | None) -> list[UnusedParameters]:
    """What finds the parameters that no rank has used: experts, and all others."""
    ranks, inside = built.ranks, set(map(id, built.experts))
    units = [unit for part in built.parts for unit in fsdp_modules(part)]
    experts = [unit for unit in units if id(unit) in inside]
    others = [unit for unit in units if id(unit) not in inside]
    among = [] if ranks.loss_group is None else [ranks.loss_group]
    found = [UnusedParameters(built.model, others, among, ranks.device)]
    if expert_mesh is not None and experts:
        among = [expert_mesh.get_group(dim) for dim, size in enumerate(expert_mesh.shape) if size > 1]
        found.append(UnusedParameters(built.model, experts, among, ranks.device))
    return found


def resharding(setting: bool | int, shards: int) -> bool | int:
    """What `fully_shard` is told of reshard_after_forward: a number must be a true part of the ranks.

    Raises:
        ConfigurationError: If it does not divide the ranks.
    """
    if isinstance(setting, bool):
        return setting
    if setting == shards:
        return True
    if shards % setting:
        raise ConfigurationError(
            "fsdp2.reshard_after_forward",
            setting,
            f"must divide the {shards} ranks that share one copy of the model",
            "use one of "
            f"{', '.join(str(n) for n in range(2, shards) if shards % n == 0) or 'True and False'}",
        )
    return setting


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Gather the weights of the next units while one computes, in the forward pass and back again."""
    if len(units) < 2:
        return
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - depth) : index])))


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Where each parameter stands, a tied one maybe outside of the stage that is sharded."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, name))
    return places


def _tie_again(places: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]]) -> None:
    """Put the DTensor that took a parameter's place in a stage into its other places, too."""
    for before, found in places.items():
        now = [module._parameters[name] for module, name in found]
        after = next((parameter for parameter in now if parameter is not before), before)
        for module, name in found:
            module._parameters[name] = after


def _refuse_shared_between_stages(stages: Sequence[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other = seen.setdefault(id(parameter), number)
            if other != number:
                raise ConfigurationError(
                    "mesh",
                    "shard",
                    "shards stages by themselves, but two stages of one rank have a weight in common "
                    f"({name})",
                    "choose a schedule that has the first and the last stage on different ranks, such as "
                    "1f1b",
                )
