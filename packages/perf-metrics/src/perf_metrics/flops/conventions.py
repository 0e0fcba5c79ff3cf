"""The ways in which published tables count FLOPs, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .accounts import ROUTER, FlopsPerToken
from .architecture import Architecture
from .recomputation import hardware_flops_per_token

_FUSED = 3.5 / 3
"""Fused attention does seven products forward and backward where six are needed."""


@dataclass(frozen=True)
class Convention:
    """One way to count the training FLOPs per token.

    Attributes:
        name: Short name.
        counts: What it counts, as a formula.
        used_by: Who publishes figures in it.
        per_token: From the architecture and the sequence length.
    """

    name: str
    counts: str
    used_by: str
    per_token: Callable[[Architecture, int], float]


def _model(architecture: Architecture, length: int) -> float:
    return architecture.per_token(length).total


def _halved(architecture: Architecture, length: int) -> float:
    return architecture.per_token(length, "half").total


def _all_parameters(architecture: Architecture, length: int) -> float:
    return 6.0 * architecture.parameters + architecture.per_token(length, "dense").attention


def _torchtitan(architecture: Architecture, length: int) -> float:
    used = architecture.parameters - architecture.lookup - architecture.idle
    return 6.0 * used + architecture.per_token(length, "dense").attention


def _megatron(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length)
    router = sum(part.total for part in flops.parts if part.kind == ROUTER)
    dense = architecture.per_token(length, "dense").attention
    return flops.matmul - router + dense / 2 + flops.state


def _counter(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "dense")
    return flops.matmul + flops.attention * _FUSED


def _executed(architecture: Architecture, length: int) -> float:
    return _executed_part(architecture.per_token(length, "half"))


def _executed_part(flops: FlopsPerToken) -> float:
    return flops.matmul + flops.attention * _FUSED + flops.state


def _executed_twice(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "half")
    return _executed_part(flops) + hardware_flops_per_token(flops, "full") - flops.total


def _llm_foundry_hardware(architecture: Architecture, length: int) -> float:
    return _all_parameters(architecture, length) * 4 / 3


def _korthikanti_hardware(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "dense")
    return flops.total + flops.attention


CONVENTIONS = (
    Convention(
        "model",
        "6 N + 12 L d S; N: weights of matrix products, the output projection in, the lookup out, of experts "
        "those used; windows cut S",
        "this package, for MFU (PaLM, appendix B)",
        _model,
    ),
    Convention("model, causal half", "the same with 6 L d S", "this package, causal='half'", _halved),
    Convention(
        "all parameters",
        "6 N + 12 L d S; N: every parameter, lookup, norms and idle experts in",
        "nanoGPT, llm-foundry (MFU), torchtitan's Llama 3 tables",
        _all_parameters,
    ),
    Convention(
        "torchtitan",
        "6 N + 12 L d S; N: parameters used, less an untied lookup",
        "torchtitan at b5bcd76",
        _torchtitan,
    ),
    Convention(
        "megatron",
        "6 N + 6 L d S; N: weights of matrix products without routers",
        "Megatron-LM at 001b00c, num_floating_point_operations",
        _megatron,
    ),
    Convention(
        "torch counter",
        "6 N + 14 L d S; fused attention computes the scores again, masks do not count",
        "torch.utils.flop_counter",
        _counter,
    ),
    Convention(
        "executed",
        "6 N + 7 L d S: fused causal attention, no activation checkpointing",
        "what the tensor cores run; to hold against hardware counters",
        _executed,
    ),
    Convention(
        "executed, full recomputation",
        "the same with the forward of all layers again",
        "what the tensor cores run with full activation checkpointing",
        _executed_twice,
    ),
    Convention(
        "llm-foundry HFU",
        "4/3 of all parameters",
        "llm-foundry (HFU with activation checkpointing)",
        _llm_foundry_hardware,
    ),
    Convention(
        "Korthikanti HFU",
        "6 N + 24 L d S: attention counted twice",
        "Korthikanti et al. 2022, selective recomputation",
        _korthikanti_hardware,
    ),
)
"""Every convention, this package's own first."""


def convention(name: str) -> Convention:
    """Return a convention by its name.

    Raises:
        ValueError: There is none of that name.
    """
    for known in CONVENTIONS:
        if known.name == name:
            return known
    raise ValueError(f"convention {name!r} is not one of {', '.join(known.name for known in CONVENTIONS)}")
