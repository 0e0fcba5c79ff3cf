"""Tensors without values: what a run does to shapes and memory, without its memory and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_ACTIVE: ContextVar[bool] = ContextVar("without_values", default=False)


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which every tensor that is made has a shape, a dtype and a device, and no value.

    Operators check and compute shapes only, on torch's fake tensors. Tensors from outside may take part; what
    they give has no values. Whatever asks for a value fails.
    """
    # Takes a second to import, and only a dry run needs it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    token = _ACTIVE.set(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _ACTIVE.reset(token)


def has_no_values() -> bool:
    """Whether `without_values` is open."""
    return _ACTIVE.get()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A context within `without_values` in which tensors are what they are otherwise."""
    if not has_no_values():
        yield
        return
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def build_outline(source: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with all parameters and buffers on the meta device."""
    # Ordinary tensors of that device: torch moves and copies modules of these as always.
    with ordinary_tensors(), torch.device("meta"):
        return source()
