"""Find the blocks of a model: the row of equal modules that makes up most of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from torch import nn

from ..errors import ConfigurationError

PATH_SETTING = "transformer_layers_path"
Block = tuple[str, nn.Module]
"""Qualified name in the model, and the module."""


def find_blocks(model: nn.Module, path: str | None, *, needed_by: str) -> list[Block]:
    """Return the blocks of a model in the order of their container.

    Without a path, the container is the ModuleList, ModuleDict or Sequential that holds the most parameters
    among those whose modules are all of one class; of two that hold the same, the outer one.

    Args:
        model: The model.
        path: Dotted path of the container inside the model; None: look for it.
        needed_by: Setting that needs the blocks, for the error.

    Returns:
        (qualified name, module) of each block; a module that stands there twice is named once.

    Raises:
        ConfigurationError: If the path does not lead to a container of modules, or if none is found.
    """
    if path is None:
        path = _found_path(model, needed_by)
    container = _container_at(model, path)
    prefix = f"{path}." if path else ""
    return [(f"{prefix}{name}", module) for name, module in container.named_children()]


def _container_at(model: nn.Module, path: str) -> nn.Module:
    module: nn.Module | None = dict(model.named_modules(remove_duplicate=False)).get(path)
    if module is None:
        raise ConfigurationError(
            PATH_SETTING, path, "the model has no module of that name", _instead(model, path)
        )
    if not _is_container(module) or not any(True for _ in module.children()):
        raise ConfigurationError(
            PATH_SETTING,
            path,
            f"is a {type(module).__name__}, not a list or dict of modules",
            _instead(model, path),
        )
    return module


def _instead(model: nn.Module, path: str) -> str:
    containers = [name for name, module in model.named_modules() if name and _is_container(module)]
    if not containers:
        return "the model has no ModuleList, ModuleDict or Sequential: leave the setting out"
    near = difflib.get_close_matches(path, containers, n=3, cutoff=0.0)
    return f"nearest containers in the model: {', '.join(near)}"


def _found_path(model: nn.Module, needed_by: str) -> str:
    found, most = None, 0
    for name, module in _containers_of_one_class(model):
        size = _parameters(module)
        if size > most:
            found, most = name, size
    if found is None:
        raise ConfigurationError(
            PATH_SETTING,
            None,
            f"{needed_by} needs the blocks of the model, and {type(model).__name__} has no ModuleList, "
            "ModuleDict or Sequential of modules of one class",
            f"name their container in {PATH_SETTING}, or switch {needed_by} off",
        )
    _refuse_inside_mixed_list(model, found, needed_by)
    return found


def _containers_of_one_class(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if not _is_container(module):
            continue
        children = list(module.children())
        # One container in another: the inner one is the row.
        if len(children) == 1 and _is_container(children[0]):
            continue
        if len({type(child) for child in children}) == 1:
            yield name, module


def _refuse_inside_mixed_list(model: nn.Module, found: str, needed_by: str) -> None:
    """Models with layers of several classes: what was found is a part of one layer, such as its experts."""
    for name, module in model.named_modules():
        above = name and found.startswith(f"{name}.")
        if above and isinstance(module, nn.ModuleList) and len({type(child) for child in module}) > 1:
            raise ConfigurationError(
                PATH_SETTING,
                None,
                f"{needed_by} needs the blocks of the model; {found} lies inside {name}, "
                "a list of modules of several classes",
                f"name the container that you mean, such as {PATH_SETTING}={name!r}",
            )


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
