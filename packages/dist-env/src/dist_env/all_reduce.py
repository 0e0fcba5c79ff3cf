"""Is the all-reduce right, and how fast is it?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_env.collectives import gather_objects
from dist_env.environment import DistributedEnvironment

KIBI = 1024
_CPU_SIZES = (KIBI, 32 * KIBI, KIBI**2, 16 * KIBI**2)
_ACCELERATOR_SIZES = (KIBI, 32 * KIBI, KIBI**2, 32 * KIBI**2, 256 * KIBI**2)
# Small integers, whose sums float32 holds exactly.
_PERIOD = 251


@dataclass(frozen=True, kw_only=True)
class AllReduceResult:
    """One size.

    Attributes:
        bytes: Size of the float32 tensor on each rank.
        seconds: Median time of one all-reduce, of the slowest rank.
        algorithm_bandwidth: `bytes / seconds`, in bytes per second; None for one rank, which sends nothing.
        bus_bandwidth: That times `2 (n - 1) / n`: what each link carries, comparable between numbers of ranks
            (source: nccl-tests, doc/PERFORMANCE.md).
        wrong_ranks: Ranks whose sum was not the right one.
    """

    bytes: int
    seconds: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    wrong_ranks: tuple[int, ...]


def sizes_for(env: DistributedEnvironment, largest: float | None) -> tuple[int, ...]:
    """Sizes in bytes to measure, none above `largest`."""
    sizes = _ACCELERATOR_SIZES if env.use_accelerator else _CPU_SIZES
    return tuple(size for size in sizes if largest is None or size <= largest) or sizes[:1]


def measure_all_reduce(
    env: DistributedEnvironment, size: int, on_call: Callable[[], None]
) -> AllReduceResult:
    """Check and time an all-reduce. Call it on every rank.

    Args:
        env: The open environment.
        size: Bytes of the float32 tensor.
        on_call: Called before each all-reduce.

    Returns:
        The same result on every rank.
    """
    pattern = torch.arange(size // 4, device=env.device, dtype=torch.float32).remainder_(_PERIOD)
    values = pattern + env.rank
    on_call()
    dist.all_reduce(values)
    expected = pattern * env.world_size + env.world_size * (env.world_size - 1) // 2
    right = torch.equal(values, expected)
    times = []
    for _ in range(10 if size <= KIBI**2 else 5):
        on_call()
        _finish(env.device)
        start = time.perf_counter()
        dist.all_reduce(values)
        _finish(env.device)
        times.append(time.perf_counter() - start)
    gathered = gather_objects((statistics.median(times), right), env)
    seconds = max(median for median, _ in gathered)
    n = env.world_size
    bandwidth = size / seconds if n > 1 else None
    return AllReduceResult(
        bytes=size,
        seconds=seconds,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=None if bandwidth is None else bandwidth * 2 * (n - 1) / n,
        wrong_ranks=tuple(rank for rank, (_, ok) in enumerate(gathered) if not ok),
    )


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
