"""The objects of a training loop as components: which wrapper each needs, and how ranks share it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core.components import SharingPattern, StateComponent, Stateful
from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.optimizer_rng import OptimizerState, RNGState
from checkpoint_core.state.weights import ModelState
from checkpoint_core.storage.tensors import is_sharded

_SAME_EVERYWHERE = (LRScheduler, torch.amp.GradScaler)
Parts = nn.Module | Sequence[nn.Module]


def wrap_state(state: Mapping[str, object], world_size: int) -> list[StateComponent]:
    """One component for each object, by its type.

    A model is REPLICATED, or SHARDED if it has DTensors or is a list of parts of a model; an optimizer is as
    the model that has its parameters; a learning rate scheduler and a gradient scaler are REPLICATED; a
    loader, which is iterable, and generators are PER_RANK. A `StateComponent` stays as it is. Copies on
    several ranks must agree in names, dtypes and shapes, so that no part of a model is taken for all of it.

    Args:
        state: Models, optimizers, schedulers, loaders and the like, by component key.
        world_size: Number of ranks.

    Raises:
        CheckpointError: A key names another component, an optimizer has parameters of no model that is
            given, or an object does not tell how ranks share it.
        TypeError: An object has no state that can be saved.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}. Give a dictionary such as "
            f'{{"model": model, "optimizer": optimizer}}, whose keys name the files.'
        )
    models = {key: cast(Parts, value) for key, value in state.items() if _is_model(value)}
    components = []
    for key, value in state.items():
        if isinstance(value, StateComponent):
            if value.key != key:
                raise CheckpointError(
                    f"the StateComponent under {key!r} has the key {value.key!r}. Give it under its own key."
                )
            components.append(value)
            continue
        stateful, pattern = _wrap(key, value, models, world_size)
        components.append(
            StateComponent(
                key=key,
                stateful=stateful,
                sharing_pattern=pattern,
                validate_replication=pattern is SharingPattern.REPLICATED and world_size > 1,
                validation_level="structure",
            )
        )
    return components


def _wrap(
    key: str, value: object, models: Mapping[str, Parts], world_size: int
) -> tuple[Stateful, SharingPattern]:
    if key in models:
        return ModelState(models[key]), _pattern(models[key])
    if isinstance(value, Optimizer):
        model = _owner(key, value, models)
        return OptimizerState(value, model), _pattern(model)
    # Accelerate's scheduler is not an LRScheduler, but contains one.
    if isinstance(value, _SAME_EVERYWHERE) or isinstance(getattr(value, "scheduler", None), LRScheduler):
        return cast(Stateful, value), SharingPattern.REPLICATED
    _check_saves(key, value)
    stateful = cast(Stateful, value)
    if isinstance(value, (RNGState, Iterable)):
        return stateful, SharingPattern.PER_RANK
    if world_size > 1:
        raise CheckpointError(
            f"component {key!r}: a {type(value).__name__} does not tell how {world_size} ranks share it. "
            f"Give StateComponent(key={key!r}, stateful=..., sharing_pattern=SharingPattern.REPLICATED) if "
            "it is the same on all ranks, SHARDED if each has a part of it, or PER_RANK if each has its "
            "own."
        )
    return stateful, SharingPattern.REPLICATED


def _is_model(value: object) -> bool:
    if isinstance(value, nn.Module):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, nn.Module) for m in value)


def _parts(model: Parts) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def _pattern(model: Parts) -> SharingPattern:
    if isinstance(model, nn.Module) and not any(is_sharded(p) for p in model.parameters()):
        return SharingPattern.REPLICATED
    return SharingPattern.SHARDED


def _owner(key: str, optimizer: Optimizer, models: Mapping[str, Parts]) -> Parts:
    """The model with all parameters of an optimizer."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models.values():
        if wanted <= {id(parameter) for part in _parts(model) for parameter in part.parameters()}:
            return model
    given = f"none of the models given ({', '.join(models)}) has" if models else "no model is given that has"
    raise CheckpointError(
        f"component {key!r}: {given} all parameters of the {type(optimizer).__name__}, whose state is "
        f"stored under their names. Give the model too, or {key!r}: OptimizerState(optimizer, model)."
    )


def _check_saves(key: str, value: object) -> None:
    kind = type(value).__name__
    # The loaders that Accelerate prepares have the methods in any case. Those with use_stateful_dataloader
    # restore how many batches were taken, but not the order of a shuffle: other samples would follow.
    is_prepared = type(value).__module__.startswith("accelerate.")
    if isinstance(value, Stateful) and not (isinstance(value, Iterable) and is_prepared):
        return
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, list, tuple)):
        reason = ", since Accelerate does not restore a shuffled order" if is_prepared else ""
        raise TypeError(
            f"component {key!r}: the position of a {kind} cannot be saved{reason}. Use torchdata's "
            f"StatefulDataLoader, or build_loader of dataloader-dispatch{', as it is' * is_prepared}."
        )
    raise TypeError(
        f"component {key!r}: a {kind} has no state_dict() and load_state_dict(). Give an object that has "
        "both, or a StateComponent."
    )
