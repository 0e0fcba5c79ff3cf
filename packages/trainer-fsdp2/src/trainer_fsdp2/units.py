"""Which modules are gathered and dropped as one: a unit of sharding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer_core import ConfigurationError, find_blocks, suggest

from .arguments import FSDP2TrainingArguments

Unit = tuple[str, nn.Module]
"""Qualified name, and the module."""


def units_of(model: nn.Module, args: FSDP2TrainingArguments) -> list[Unit]:
    """Return the modules to shard by themselves; the rest goes with the root.

    Args:
        model: The model, before it is sharded.
        args: fsdp2.shard_transformer_layers, fsdp2.layer_classes and transformer_layers_path.

    Raises:
        ConfigurationError: If nothing is found where the arguments point to, if one unit lies in another, or
            if units share a parameter.
    """
    if not args.fsdp2.shard_transformer_layers:
        return []
    if args.fsdp2.layer_classes is not None:
        units = _of_classes(model, args.fsdp2.layer_classes)
    else:
        units = find_blocks(model, args.transformer_layers_path, needed_by="fsdp2.shard_transformer_layers")
    refuse_shared_between(units, model)
    return units


def _of_classes(model: nn.Module, names: Sequence[str]) -> list[Unit]:
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                "fsdp2.layer_classes", name, "the model has no module of that class", suggest(name, known)
            )
    # Deepest first, as fully_shard wants it: a unit inside another takes its parameters out of it.
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]
    return sorted(found, key=lambda unit: -unit[0].count("."))


def refuse_scalars(model: nn.Module) -> None:
    """Refuse parameters without a dimension, which have no rows to divide.

    Raises:
        ConfigurationError: Naming the first.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigurationError(
                "model",
                name,
                "is a parameter without a dimension, and ranks share parameters by rows",
                "give it the shape [1]",
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
                    f"{other} and {name} are one parameter, and {other_unit or unit} is sharded by itself",
                    "leave that module out of fsdp2.layer_classes or transformer_layers_path, or set "
                    "fsdp2.shard_transformer_layers=False",
                )
