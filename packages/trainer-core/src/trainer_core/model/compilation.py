"""Compile a model as a whole or block by block, in place, so that parameters keep their names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from torch import nn

from ..errors import ConfigurationError
from .blocks import find_blocks

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

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
        raise ConfigurationError("torch_compile_backend", backend, "torch has no such backend", fix)
    if mode not in (None, "default"):
        raise ConfigurationError(
            "torch_compile_mode",
            mode,
            f"is a mode of inductor, and torch_compile_backend is {backend!r}",
            "leave one of them out",
        )
