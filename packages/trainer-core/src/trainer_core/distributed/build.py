"""From what the user gave to the model that this rank holds: the order is decided here and nowhere else.

1. construct: parameters without storage where a transform divides them, buffers with their values;
2. convert: FP8 or QAT layers, and the forward of checkpointed blocks, while every module is there. A block
   whose weights are gathered is gathered once for its recomputation, and conversion, which replaces modules,
   cannot drop what a transform hangs on them;
3. transform: split into stages, divide experts and tensors, divide sequences, shard weights or replicate;
4. fill: storage for what this rank holds, and the values that one process would have drawn;
5. compile, in place.

The optimizer comes after that and sees what this rank holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from torch import nn

from dist_env import DistributedEnvInterface, DistributedEnvironmentError, ParallelLayout, gather_objects

from ..arguments import DataParallelArguments, TrainingArguments
from ..errors import ConfigurationError
from ..generation import share_generators
from ..loss import FusedLossFactory, OnTargets, TokenLoss, check_takes_targets, loss_of, takes_targets
from ..model import (
    ModelSource,
    RecomputeFn,
    checkpoint_activations,
    compile_model,
    construct_without_weights,
    convert_model,
    fill_parameters,
    move_buffers,
    ordinary_tensors,
    prepare_model,
)
from .ranks import Ranks
from .routers import with_routers
from .transforms import BuiltModel, ModelTransform, copy_weights_of_rank_0, in_order

GROUP = "trainer_core.transforms"
"""Entry points by which packages offer a transform for a dimension: `shard = "package:factory"`, called with
the arguments of the run."""
_COUNTED = ("pipeline", "expert", "tensor", "context")
"""Dimensions after whose transforms the model cannot be counted by running it."""


def layout_of(
    args: TrainingArguments, transforms: Sequence[ModelTransform], env: DistributedEnvInterface
) -> ParallelLayout:
    """The sizes that the arguments give to the dimensions.

    Without `mesh` all ranks are in the dimension of the first transform.

    Raises:
        ConfigurationError: If the sizes do not fit the ranks, or nothing says what the ranks are for.
    """
    world_size = env.world_size
    if not isinstance(args, DataParallelArguments):
        if world_size == 1:
            return ParallelLayout()
        raise ConfigurationError(
            "args" if transforms else "world_size",
            type(args).__name__ if transforms else world_size,
            "must be a DataParallelArguments for several ranks"
            if transforms
            else "is more than a Trainer for one device can use",
            "use the arguments class of the trainer, or DataParallelArguments"
            if transforms
            else "start one process, or use a trainer for several devices",
        )
    try:
        layout = args.layout(world_size)
        if layout is None:
            axis = transforms[0].axis if transforms else None
            if axis is None and world_size > 1:
                raise ConfigurationError(
                    "world_size",
                    world_size,
                    "needs a mesh or parallel, which say what the ranks are for",
                    "start one process, set mesh='dp=2', for example, or use a trainer for several devices",
                )
            layout = ParallelLayout(**({} if axis is None else {axis: world_size}))
    except DistributedEnvironmentError as error:
        raise ConfigurationError("mesh", args.mesh, f"cannot be used: {error}", "change the mesh") from error
    return layout


def listed(parallel: object) -> list[ModelTransform]:
    """What `parallel` gives, as a list.

    Raises:
        ConfigurationError: If it is a transform itself, or something else.
    """
    if not isinstance(parallel, Iterable):
        raise ConfigurationError(
            "parallel",
            parallel,
            "is not a list of transforms",
            "write parallel=[...], even for a single transform",
        )
    return list(parallel)


def transforms_for(
    args: TrainingArguments, given: Sequence[ModelTransform], layout: ParallelLayout
) -> list[ModelTransform]:
    """The transforms of a run, in order: those given, and one for each dimension that none of them uses.

    Raises:
        ConfigurationError: If nothing that is installed uses a dimension of the layout.
    """
    transforms = list(given)
    used = {transform.axis for transform in given}
    # Ranks that share out sequences share out the weights, too: so their gradients are added up.
    needs = {axis: getattr(layout, axis) > 1 for axis in ("pipeline", "expert", "tensor", "context")}
    needs["shard"] = layout.shards_weights
    needs["replicate"] = layout.replicate > 1 and not layout.shards_weights
    for axis, needed in needs.items():
        if axis in used:
            continue
        if isinstance(args, DataParallelArguments) and (own := args.transform_for(axis, needed=needed)):
            transforms.append(own)
        elif needed:
            transforms.append(_installed(args, axis, layout))
    return in_order(transforms)


def _installed(args: TrainingArguments, axis: str, layout: ParallelLayout) -> ModelTransform:
    if axis == "replicate":
        from .transforms import ReplicateGradients

        return ReplicateGradients()
    for entry in entry_points(group=GROUP, name=axis):
        transform: ModelTransform = entry.load()(args)
        return transform
    package = {"pipeline": "trainer-pipeline", "shard": "trainer-fsdp2"}.get(axis)
    raise ConfigurationError(
        "mesh",
        str(layout),
        f"gives several ranks to the dimension {axis}, which no given or installed transform uses",
        f"install {package}" if package else f"give a transform with axis={axis!r} in parallel=[...]",
    )


def build_model(
    source: ModelSource,
    args: TrainingArguments,
    ranks: Ranks,
    transforms: Sequence[ModelTransform],
    *,
    skip_init: bool,
    recompute_fn: RecomputeFn | None = None,
) -> BuiltModel:
    """Build what this rank holds of the model, with the values that one process would have drawn; collective.

    Args:
        source: The module, or a function that makes it.
        args: How to make it.
        ranks: The ranks.
        transforms: How they use the model, in order.
        skip_init: Whether a checkpoint will fill every weight, so that with construct_model_on="meta" none
            need be drawn.
        recompute_fn: Names the modules that are recomputed, with activation_checkpointing="custom".

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation, or ranks
            have built different models.
    """
    active = [transform for transform in transforms if transform.is_active(ranks.layout)]
    if all(transform.keeps_parameters for transform in active):
        model = prepare_model(source, args, ranks.device, weights_follow=skip_init, recompute_fn=recompute_fn)
        built = BuiltModel(args, ranks, model, model)
        ranks.check_same_model(model)
        for transform in active:
            transform.apply(built)
        return built
    if ranks.several:
        share_generators(ranks.env)  # without a seed each rank would draw a model of its own
    model, values = construct_without_weights(source, args, ranks.device)
    ranks.check_same_model(model)
    if values is None and ranks.meshes is not None and ranks.several:
        _copy_weights(model, ranks)
    counts_apart = any(transform.axis in _COUNTED for transform in active)
    built = BuiltModel(args, ranks, model, meta_copy(model, args, recompute_fn) if counts_apart else model)
    built.is_partial = True
    for transform in active:
        transform.before_conversion(built)
    convert_model(model, args, ranks.device, gathered_in_fp8=built.gathers_fp8, recompute_fn=recompute_fn)
    for transform in active:
        transform.apply(built)
    draw = not (skip_init and args.construct_model_on == "meta")
    others = [part for part in built.parts if part is not model]
    sums = fill_parameters(
        model, values if draw else None, built.weights_device or ranks.device, also_in=others
    )
    move_buffers(model, ranks.device)
    _check_same_values(sums, ranks)
    return built


def make_loss(
    built: BuiltModel, given: TokenLoss | None, fused_factory: FusedLossFactory | None
) -> TokenLoss:
    """The loss of the run, which `Window` and evaluation give targets if it takes them.

    It is asked for when the layers have been converted, and before compilation.

    Args:
        built: The model; a rank that does not hold its end only counts with the loss.
        given: The user's loss, which goes first.
        fused_factory: Makes a loss on hidden states from the output head.

    Raises:
        ConfigurationError: If settings contradict each other, or the loss cannot be fused with the model.
    """
    if built.has_loss:
        loss = loss_of(built.args, built.model, given, fused_factory)
    else:
        loss = loss_of(replace(built.args, fused_loss="no"), built.meta_model, given, fused_factory)
    check_takes_targets(loss, built.ranks.layout)
    # A loss with its own way to run the model may have its own way with what routers return.
    sees_outputs = given is not None and not takes_targets(given) and hasattr(given, "predict")
    return with_routers(built, OnTargets(loss) if takes_targets(loss) else loss, sees_outputs=sees_outputs)


def compile_built(built: BuiltModel) -> None:
    """Compile the model as a whole or block by block, if asked to; in place, so that names stay."""
    args = built.args
    if args.torch_compile and built.compiled_blocks is not None:
        args = replace(args, torch_compile_scope="blocks", transformer_layers_path=built.compiled_blocks)
    compile_model(built.model, args)


def _copy_weights(model: nn.Module, ranks: Ranks) -> None:
    """Give a model that was built already the weights of rank 0."""
    import torch.distributed as dist

    copy_weights_of_rank_0(model, dist.group.WORLD)


def meta_copy(
    model: nn.Module, args: TrainingArguments, recompute_fn: RecomputeFn | None = None
) -> nn.Module:
    """A copy of a model without storage, to count what it has and computes; blocks recompute in it too."""
    with ordinary_tensors():
        copied = copy.deepcopy(model)
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in copied.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    checkpoint_activations(copied, args, recompute_fn)
    return copied


def _check_same_values(sums: Mapping[str, tuple[float, float]], ranks: Ranks) -> None:
    """Refuse to start where ranks that hold the same parameter begin with different values of it."""
    if not ranks.several or ranks.meshes is None:
        return
    # To six digits: processors of different kinds may add up in another order.
    mine = {name: f"{total:.6g}, {squares:.6g}" for name, (total, squares) in sums.items()}
    if ranks.layout.pipeline == 1:
        facts = {f"sum and sum of squares of the initial {name}": value for name, value in mine.items()}
        ranks.check_same(facts)
        return
    told: Iterable[dict[str, str]] = gather_objects(mine, ranks.env)
    for name in dict.fromkeys(name for each in told for name in each):
        seen = {each[name] for each in told if name in each}
        if len(seen) > 1:
            raise ConfigurationError(
                "model_init",
                name,
                f"gives this parameter different values on ranks that share it: {sorted(seen)} (sum and sum "
                "of squares)",
                "draw weights from torch's generators only, and set the same seed everywhere",
            )
