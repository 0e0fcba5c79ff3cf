"""Peak device memory of an interval."""

from __future__ import annotations

import torch

from .parallelism import Parallelism


def take_peak_memory(parallel: Parallelism) -> list[int] | None:
    """Most bytes allocated since the last call, one figure per rank; None without an accelerator."""
    if parallel.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(parallel.device)
    torch.cuda.reset_peak_memory_stats(parallel.device)
    return [int(value) for (value,) in parallel.gather([float(peak)])]
