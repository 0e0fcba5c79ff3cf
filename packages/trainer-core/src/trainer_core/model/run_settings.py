"""Process-wide switches of torch, set for the length of a run and set back afterwards, errors included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..memory.offload import activation_offload
from .attention import attention_context

if TYPE_CHECKING:
    from ..arguments import TrainingArguments


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
            f"torch {torch.__version__} does not have it",
            "install another torch, or leave it out",
        )
    with functorch.patch(activation_memory_budget=budget):
        yield
