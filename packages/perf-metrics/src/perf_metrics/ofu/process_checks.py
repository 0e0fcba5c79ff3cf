"""Settings of this process that are known to slow training down."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Finding:
    """A setting of this process that costs time.

    Attributes:
        setting: Name of the variable, function or argument.
        value: What it is set to.
        effect: What it does to the speed.
        fix: What to change.
    """

    setting: str
    value: str
    effect: str
    fix: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.effect}; {self.fix}"


def check_process(loader: Iterable[object] | None = None, *, device_type: str | None = None) -> list[Finding]:
    """Return the settings of this process that are known to slow training down.

    What a library reads from the environment when it is loaded is looked at as the environment is now. torch
    is asked only if it is loaded already. An empty list says that none of these settings is on, and no more.

    Args:
        loader: The data loader, to see whether it pins its memory. One without an attribute `pin_memory` is
            not judged.
        device_type: Where the batches go, such as "cuda"; by default what torch says, if it is loaded.

    Returns:
        Findings, those that cost most as a rule first.
    """
    torch = sys.modules.get("torch")
    return [
        *_distributed(torch),
        *_environment(),
        *_torch_modes(torch),
        *_profilers(torch),
        *_pageable_copies(loader, device_type or _accelerator(torch)),
    ]


def _distributed(torch: ModuleType | None) -> Iterator[Finding]:
    # In force is what torch read when it was loaded, or was told since; any case will do in the variable.
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available():
        level = str(distributed.get_debug_level().name)
    if level == "DETAIL":
        yield Finding(
            "TORCH_DISTRIBUTED_DEBUG",
            "DETAIL",
            "before each collective all ranks compare shapes through extra gloo collectives, and the tensor "
            "cores wait (divergence case 4 of the OFU paper)",
            "unset it, or use INFO",
        )


_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": (
        ("", "0"),
        "every kernel launch waits for the kernel, so that the device idles between kernels",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("",),  # any value switches it on
        "every tensor is a cudaMalloc and a cudaFree, which wait for the device",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        ("", "0"),
        "the host waits for each collective before it launches more",
    ),
}
"""Variables, the values that leave them off, and what they do."""


def _environment() -> Iterator[Finding]:
    for name, (off, effect) in _SLOW_VARIABLES.items():
        if os.environ.get(name, "").strip() not in off:
            yield _variable(name, effect)
    level = os.environ.get("NCCL_DEBUG", "").upper()
    subsystems = os.environ.get("NCCL_DEBUG_SUBSYS", "").upper()
    if level == "TRACE":
        yield _variable("NCCL_DEBUG", "NCCL logs every call", "use WARN")
    elif level == "INFO" and {"COLL", "P2P", "CALL", "ALL"} & set(subsystems.split(",")):
        yield _variable("NCCL_DEBUG_SUBSYS", "with NCCL_DEBUG=INFO NCCL logs every call", "use INIT,ENV")


def _variable(name: str, effect: str, fix: str = "unset it") -> Finding:
    return Finding(name, os.environ[name], effect, fix)


def _torch_modes(torch: ModuleType | None) -> Iterator[Finding]:
    if torch is None:
        return
    if torch.is_anomaly_enabled():
        yield Finding(
            "torch.autograd.set_detect_anomaly",
            "True",
            "each operation keeps its stack, and each gradient is searched for NaN: the host waits for it",
            "leave detect_anomaly off but to look for a NaN",
        )
    if torch.are_deterministic_algorithms_enabled():
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        small = " (the workspace :16:8 may limit cuBLAS further)" if workspace == ":16:8" else ""
        yield Finding(
            "torch.use_deterministic_algorithms",
            "True",
            f"slower kernels are chosen, and memory is filled before it is used{small}",
            "torch.use_deterministic_algorithms(False); "
            "else torch.utils.deterministic.fill_uninitialized_memory = False",
        )
    elif torch.backends.cudnn.deterministic:
        yield Finding(
            "torch.backends.cudnn.deterministic",
            "True",
            "slower convolution kernels are chosen",
            "set it to False",
        )


def _profilers(torch: ModuleType | None) -> Iterator[Finding]:
    if torch is not None and torch.autograd.profiler._is_profiler_enabled:
        yield Finding(
            "torch.profiler", "active", "each operation is recorded", "end it, or profile a few steps"
        )
    for name, what in (("getprofile", "profile"), ("gettrace", "trace")):
        function = getattr(sys, name)()
        if function is not None:
            yield Finding(
                f"sys.set{what}",
                getattr(function, "__qualname__", type(function).__qualname__),
                "Python calls a function at each call or line; the host may launch kernels too late",
                "run without the Python profiler, debugger or coverage tool",
            )
    if tracemalloc.is_tracing():
        yield Finding(
            "tracemalloc",
            "tracing",
            "each Python allocation is recorded",
            "unset PYTHONTRACEMALLOC, or stop() it",
        )


def _accelerator(torch: ModuleType | None) -> str | None:
    if torch is None:
        return None
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else str(current.type)


def _pageable_copies(loader: Iterable[object] | None, device_type: str | None) -> Iterator[Finding]:
    # On "mps" memory is shared, and pinning means nothing.
    if loader is None or device_type in (None, "cpu", "mps"):
        return
    if getattr(loader, "pin_memory", None) is False:
        yield Finding(
            f"{type(loader).__qualname__}.pin_memory",
            "False",
            f"copies to {device_type} go through pageable memory, and the host waits for each of them",
            "pin_memory=True, and .to(device, non_blocking=True)",
        )
