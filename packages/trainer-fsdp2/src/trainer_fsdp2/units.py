"""Which modules are gathered and dropped as one: a unit of sharding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from trainer_core import ConfigurationError, find_blocks, suggest

from .arguments import FSDP2Arguments

Unit = tuple[str, nn.Module]
"""Qualified name, and the module."""


def units_of(model: nn.Module, settings: FSDP2Arguments, path: str | None) -> list[Unit]:
    """Return the modules to shard by themselves; the rest goes with the root.

    Args:
        model: The model, before it is sharded.
        settings: shard_transformer_layers and layer_classes.
        path: Qualified name of the container of the blocks; None: it is looked for.

    Raises:
        ConfigurationError: If nothing is found where the arguments point to, if one unit lies in another, or
            if units share a parameter.
    """
    units: list[Unit] = []
    if not settings.shard_transformer_layers:
        pass
    elif settings.layer_classes is not None:
        units = _of_classes(model, settings.layer_classes)
    else:
        units = find_blocks(model, path, needed_by="fsdp2.shard_transformer_layers")
    refuse_shared_between(units, model)
    refuse_mixed_dtypes(units, model)
    return units


def _of_classes(model: nn.Module, names: Sequence[str]) -> list[Unit]:
    inner = [module for module in model.modules() if module is not model]
    # A container is never called, so nothing would gather its weights.
    known = {type(module).__name__ for module in inner if type(module).forward is not nn.Module.forward}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                "fsdp2.layer_classes",
                name,
                "is not the class of a part of the model that is called. Those are "
                f"{', '.join(sorted(known))}",
                suggest(name, known),
            )
    # Deepest first, as fully_shard wants it: a unit inside another takes its parameters out of it.
    found = [
        (name, module)
        for name, module in model.named_modules()
        if module is not model and type(module).__name__ in names
    ]
    return sorted(found, key=lambda unit: -unit[0].count("."))


def refuse_unshardable(model: nn.Module) -> None:
    """Refuse parameters whose rows cannot be divided among ranks.

    Raises:
        ConfigurationError: Naming the first.
    """
    for name, parameter in model.named_parameters():
        for applies, rule, fix in (
            (is_lazy(parameter), "gets its shape in the first forward pass", "give the module its sizes"),
            (
                parameter.ndim == 0,
                "has no dimension, and ranks share parameters by rows",
                "make its shape [1]",
            ),
            (parameter.numel() == 0, "has no elements", "leave it out"),
            (not parameter.is_contiguous(), "is not contiguous", "make it with .contiguous()"),
        ):
            if applies:
                raise ConfigurationError(
                    "model", name, f"cannot be sharded, because the parameter {rule}", fix
                )


def refuse_mixed_dtypes(units: Sequence[Unit], model: nn.Module) -> None:
    """Refuse trained parameters of several dtypes in one unit, whose gradients would have to travel as one.

    Raises:
        ConfigurationError: Naming two of them.
    """
    taken: set[int] = set()
    for unit, module in (*units, ("the rest of the model", model)):
        first: tuple[str, nn.Parameter] | None = None
        for name, parameter in module.named_parameters(prefix="" if module is model else unit):
            if id(parameter) in taken or not parameter.requires_grad:
                continue
            taken.add(id(parameter))
            first = first or (name, parameter)
            if parameter.dtype != first[1].dtype:
                raise ConfigurationError(
                    "model",
                    unit,
                    f"is sharded as one unit, but has trained parameters of several dtypes: {first[0]} is "
                    f"{first[1].dtype}, {name} is {parameter.dtype}",
                    "train in one dtype, freeze the others, or make them units of fsdp2.layer_classes",
                )


def refuse_shared_between(units: Sequence[Unit], model: nn.Module) -> None:
    """Refuse parameters that a unit shares with another unit, or with the rest of the model.

    Each unit drops and gathers its own copy, so that a tie across units would be broken without a word. Ties
    within one unit, or within the rest, such as those of embedding and output head, are kept.

    Raises:
        ConfigurationError: Naming both places.
    """
    owner: dict[int, tuple[str, str]] = {}
    own = {id(unit): name for name, unit in units}
    inside = {"": ""}
    # Each module at each of its places: units may share a whole layer.
    for prefix, module in model.named_modules(remove_duplicate=False):
        unit = inside[prefix] = own.get(id(module), inside[prefix.rpartition(".")[0]])
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False):
            other_unit, other = owner.setdefault(id(parameter), (unit, name))
            if other_unit != unit:
                raise ConfigurationError(
                    "fsdp2.shard_transformer_layers",
                    True,
                    f"cannot be applied, because {other} and {name} are one parameter and "
                    f"{other_unit or unit} is sharded by itself",
                    "leave that module out of fsdp2.layer_classes or transformer_layers_path, or set "
                    "fsdp2.shard_transformer_layers=False",
                )
