"""Peak device memory of an interval."""

from __future__ import annotations

import torch

from .distributed.ranks import Ranks


def take_peak_memory(ranks: Ranks) -> list[int] | None:
    """Most bytes allocated since the last call, one figure per rank; None without an accelerator."""
    if ranks.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(ranks.device)
    torch.cuda.reset_peak_memory_stats(ranks.device)
    return [int(value) for (value,) in ranks.gather([float(peak)])]
