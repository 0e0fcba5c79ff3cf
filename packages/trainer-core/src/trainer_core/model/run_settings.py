"""Process-wide switches of torch, set for the length of a run and set back afterwards, errors included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpoint_core import RNGState
from model_parallel import attention_kernel

from ..errors import ConfigurationError
from .offload import activation_offload

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

    from ..arguments import TrainingArguments

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
            rule = "is not available on the CPU"
            raise ConfigurationError(SETTING, name, rule, f"use {' or '.join(_ON_CPU)}")
        return
    if device.type != "cuda":
        return
    probe = _BUILT.get(name)
    if probe is not None and not getattr(torch.backends.cuda, probe)():
        raise _not_built(name)
    if name == "cudnn" and not torch.backends.cudnn.is_available():
        raise _not_built(name)
    _check_capability(name, device)


def _check_capability(name: str, device: torch.device) -> None:
    least = _CAPABILITY.get(name)
    if least is None or torch.version.hip is not None:
        return
    has = torch.cuda.get_device_capability(device)
    if has < least:
        rule = f"needs compute capability {least[0]}.{least[1]}, but {device} has {has[0]}.{has[1]}"
        raise ConfigurationError(SETTING, name, rule, "use another backend")


def _not_built(name: str) -> ConfigurationError:
    return ConfigurationError(
        SETTING, name, f"is not available in torch {torch.__version__} on this machine", "use another backend"
    )


@contextmanager
def run_settings(args: TrainingArguments, device: torch.device, *, training: bool = True) -> Iterator[None]:
    """Apply every process-wide switch that the arguments ask for, and set all back afterwards.

    Args:
        args: detect_anomaly, dynamo_recompile_limit, activation_memory_budget, float32_matmul_precision,
            sdpa_backend and sdpa_set_priority; in training also enable_activation_offloading.
        device: Where the model runs.
        training: Whether this is a training run; an evaluation saves no activations.

    Raises:
        ConfigurationError: If this torch or device does not have what is asked for.
    """
    from ..precision import matmul_precision

    with ExitStack() as stack:
        stack.enter_context(attention_context(args.sdpa_backend, args.sdpa_set_priority, device))
        if args.sdpa_backend is not None:
            stack.enter_context(attention_kernel("masks"))  # FlexAttention is none of those that were chosen
        stack.enter_context(matmul_precision(args))
        stack.enter_context(recompile_limit(args.dynamo_recompile_limit))
        stack.enter_context(memory_budget(args.activation_memory_budget))
        stack.enter_context(anomaly_detection(args.detect_anomaly))
        if training:
            stack.enter_context(activation_offload(args, device))
        yield


@contextmanager
def anomaly_detection(on: bool) -> Iterator[None]:
    """Make autograd name the forward operation behind a failing or NaN gradient; waits for the device."""
    if not on:
        yield
        return
    with torch.autograd.set_detect_anomaly(True):
        yield


@contextmanager
def recompile_limit(limit: int | None) -> Iterator[None]:
    """Limit how often torch.compile compiles one piece of code; None leaves torch's own limit."""
    if limit is None:
        yield
        return
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=limit):
        yield


@contextmanager
def memory_budget(budget: float | None) -> Iterator[None]:
    """Let the compiler keep at most this share of the activations; 0.0 recomputes all it can, None is off.

    The share is of what the compiler would keep by default. It counts for code that is compiled in this
    context; code of the same model class that was compiled before in this process stays as it is.

    Raises:
        ConfigurationError: If this torch has no memory budget.
    """
    if budget is None:
        yield
        return
    import torch._functorch.config as functorch

    if not hasattr(functorch, "activation_memory_budget"):
        raise ConfigurationError(
            "activation_memory_budget",
            budget,
            f"is not supported by torch {torch.__version__}",
            "install another version of torch, or leave it out",
        )
    with functorch.patch(activation_memory_budget=budget):
        yield


@contextmanager
def inference_mode_guard(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module and all random generators are put back."""
    modes = {module: module.training for module in model.modules()}
    generators = RNGState()
    before = generators.state_dict()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        generators.load_state_dict(before)
        for module, training in modes.items():
            module.training = training
