"""The blocks of a model, which make up most of it: how to find, shard and compile them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from torch import nn

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs
    from torch.distributed.fsdp import FSDPModule

    from ..arguments import TrainingArguments

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
            PATH_SETTING, path, "is not the name of a module in the model", _instead(model, path)
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
        return "leave it out, because the model has no ModuleList, ModuleDict or Sequential"
    near = difflib.get_close_matches(path, containers, n=3, cutoff=0.0)
    return f"use one of the nearest containers in the model: {', '.join(near)}"


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
            f"does not name the blocks of the model, which {needed_by} needs, and {type(model).__name__} "
            "has no ModuleList, ModuleDict or Sequential of modules of one class",
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
                f"does not name the blocks of the model, which {needed_by} needs, and {found} lies inside "
                f"{name}, a list of modules of several classes",
                f"name the container that you mean, such as {PATH_SETTING}={name!r}",
            )


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that are gathered and dropped as one, outer ones first."""
    from torch.distributed.fsdp import FSDPModule  # takes seconds to import

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def use_sum_reduction(model: nn.Module) -> list[FSDPModule]:
    """Have a sharded model add gradients up over the ranks: the loss is divided by the tokens of all of them.

    Args:
        model: The model, to which `fully_shard` has been applied.

    Returns:
        Its `fsdp_modules`.
    """
    units = fsdp_modules(model)
    for unit in units:
        _keep_name(type(unit))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # A rank whose batch leaves a parameter out takes part in the sum with zeros, as the others wait.
        zeros_for_unused = getattr(unit, "set_reduce_scatter_unused_params", None)
        if callable(zeros_for_unused):  # torch 2.11 does not have it
            zeros_for_unused(True)
    return units


def _keep_name(cls: type) -> None:
    """Call a class that torch has made for sharding by the name of the user's class, in logs and errors."""
    cls.__name__ = cls.__mro__[2].__name__


DEFAULT_BACKEND = "inductor"


def compile_model(model: nn.Module, args: TrainingArguments) -> list[str]:
    """Compile what the arguments name; call it last, after sharding and activation checkpointing.

    Blocks of one class share their compiled code, so that compiling blocks takes the time of one of them.

    Args:
        model: The model.
        args: The settings torch_compile_*.

    Returns:
        Qualified names of the modules that will be compiled at their first call; "" is the model itself.

    Raises:
        ConfigurationError: If torch has no such backend, the backend has no such mode, or the blocks are not
            found.
    """
    if not args.torch_compile:
        return []
    backend = args.torch_compile_backend or DEFAULT_BACKEND
    _check_backend(backend, args.torch_compile_mode)
    for _, module in (targets := _targets(model, args)):
        module.compile(
            backend=backend,
            mode=args.torch_compile_mode,
            dynamic=args.torch_compile_dynamic,
            fullgraph=args.torch_compile_full_graph,
        )
    return [name for name, _ in targets]


def _targets(model: nn.Module, args: TrainingArguments) -> list[tuple[str, nn.Module]]:
    if args.torch_compile_scope == "blocks":
        return find_blocks(model, args.transformer_layers_path, needed_by="torch_compile_scope")
    return [("", model)]


def _check_backend(backend: str, mode: str | None) -> None:
    # No list_backends() in general: it would import torch._dynamo's tracing before it is needed.
    if backend == DEFAULT_BACKEND:
        return
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        near = difflib.get_close_matches(backend, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
        raise ConfigurationError("torch_compile_backend", backend, "is not a backend of torch.compile", fix)
    if mode not in (None, "default"):
        raise ConfigurationError(
            "torch_compile_mode",
            mode,
            f"is a mode of inductor, but torch_compile_backend is {backend!r}",
            "leave one of them out",
        )


class RecompileCounter(AbstractContextManager["RecompileCounter"]):
    """Counts, in its context, compilations of code that was compiled before in it.

    Torch calls it when a compilation starts, so it costs nothing while nothing is compiled. Torch's compiler
    is imported only if the arguments ask for compilation.

    Args:
        args: torch_compile.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._on = args.torch_compile
        self._seen: set[str] = set()
        self._recompiles = 0

    def __enter__(self) -> Self:
        if self._on:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._started)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._on:
            return
        from torch._dynamo.callback import callback_handler

        # torch._dynamo.reset() and others may have cleared the list.
        if self._started in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._started)

    def count(self) -> int | None:
        """Return the number of recompilations since the last call; None when nothing is to be compiled."""
        taken, self._recompiles = self._recompiles, 0
        return taken if self._on else None

    def _started(self, compilation: CallbackArgs) -> None:
        # A backward graph or an autotuning run belongs to a compilation that was counted already.
        if compilation.callback_trigger.name != "DYNAMO":
            return
        code, _, _ = compilation.compile_id.rpartition("/")
        if code in self._seen:
            self._recompiles += 1
        self._seen.add(code)
