"""Choose among torch's implementations of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

SETTING = "sdpa_backend"
_MEMBERS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_ON_CPU = ("math", "flash")
"""The implementations that torch has for the CPU."""
_BUILT = {"flash": "is_flash_attention_available"}
"""Functions of torch.backends.cuda that tell whether this build of torch has an implementation."""
_CAPABILITY = {"flash": (8, 0), "cudnn": (8, 0)}
"""Least compute capability of NVIDIA devices, from the checks in torch's sdp_utils.cpp."""


def attention_context(
    backends: str | Sequence[str | SDPBackend] | SDPBackend | None,
    set_priority: bool,
    device: torch.device,
) -> AbstractContextManager[object]:
    """Return a context in which attention uses only these implementations.

    Args:
        backends: math, flash, efficient or cudnn, a member of `torch.nn.attention.SDPBackend`, or several of
            them; None leaves the choice to torch.
        set_priority: Whether the order is the order of preference.
        device: Where attention runs.

    Raises:
        ConfigurationError: For another type or name, an empty list, or an implementation that the installed
            torch does not have for this device.
    """
    if backends is None:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = [backends] if isinstance(backends, str | SDPBackend) else backends
    if not isinstance(given, list | tuple) or not given:
        raise _not_a_choice(backends)
    names = [_name_of(backend) for backend in given]
    for name in names:
        _check_available(name, device)
    return sdpa_kernel([getattr(SDPBackend, _MEMBERS[name]) for name in names], set_priority=set_priority)


def _name_of(backend: object) -> str:
    for name, member in _MEMBERS.items():
        if backend == name or getattr(backend, "name", None) == member:
            return name
    raise _not_a_choice(backend)


def _not_a_choice(value: object) -> ConfigurationError:
    return ConfigurationError(
        SETTING, value, f"must be one or several of {', '.join(_MEMBERS)}", "choose one of these"
    )


def _check_available(name: str, device: torch.device) -> None:
    if device.type == "cpu":
        if name not in _ON_CPU:
            rule = "torch has no such attention for the CPU"
            raise ConfigurationError(SETTING, name, rule, f"use {' or '.join(_ON_CPU)}")
        return
    if device.type != "cuda":
        return
    probe = _BUILT.get(name)
    if probe is not None and not getattr(torch.backends.cuda, probe)():
        raise _not_built(name)
    if name == "cudnn" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        raise _not_built(name)
    _check_capability(name, device)


def _check_capability(name: str, device: torch.device) -> None:
    least = _CAPABILITY.get(name)
    if least is None or torch.version.hip is not None:
        return
    has = torch.cuda.get_device_capability(device)
    if has < least:
        rule = f"needs compute capability {least[0]}.{least[1]}, {device} has {has[0]}.{has[1]}"
        raise ConfigurationError(SETTING, name, rule, "use another")


def _not_built(name: str) -> ConfigurationError:
    return ConfigurationError(
        SETTING, name, f"torch {torch.__version__} has no such attention on this machine", "use another"
    )
