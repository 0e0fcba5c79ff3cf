"""The doctor's examination of a job, to be called from any program: ranks, devices, links and all-reduces."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from dist_env.collectives import barrier, gather_objects
from dist_env.device import synchronize
from dist_env.device_check import check_device, find_slow_devices, find_wrong_devices
from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError
from dist_env.point_to_point import LinkResult, find_slow_links, find_wrong_links, measure_pairs
from dist_env.rank_report import RankReport, find_warnings, report_rank
from dist_env.tables import name_ranks

PHASES = ("describe", "barrier", "all_reduce", "compute", "links")
_KIBI = 1024
_CPU_SIZES = (_KIBI, 32 * _KIBI, _KIBI**2, 16 * _KIBI**2)
_ACCELERATOR_SIZES = (_KIBI, 32 * _KIBI, _KIBI**2, 32 * _KIBI**2, 256 * _KIBI**2)
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


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `examine` found, the same on every rank. `dataclasses.asdict` makes JSON values of it.

    Attributes:
        ranks: What each rank says about itself, and what its device computed.
        all_reduce: One result per size; empty for a single process without a process group.
        links: One result per pair of ranks that was tried; empty for one rank.
        warnings: Settings, differences and slow parts to look at, one line each.
        problems: Wrong results and slow accelerators, one line each, with rank, host and device.
        seconds: Duration of the examination.
    """

    ranks: list[RankReport]
    all_reduce: list[AllReduceResult]
    links: list[LinkResult]
    warnings: list[str]
    problems: list[str]
    seconds: float


def examine(
    env: DistributedEnvironment,
    *,
    max_bytes: float | None = None,
    timeout: float = 60.0,
    on_phase: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Look at every rank, and try out devices, links and all-reduces. Call it on every rank.

    It takes about a second on CPUs and a few on accelerators, of which it uses up to 1.5 GB each. A rank that
    stalls is waited for as in any collective; beat a `Heartbeat` from `on_phase` to have it named.

    Args:
        env: The open environment.
        max_bytes: Largest all-reduce and transfer to try, in bytes; None for 16 MiB on CPUs and 256 MiB on
            accelerators.
        timeout: Seconds for all ranks to arrive at the start.
        on_phase: Called with `describe`, `barrier`, `all_reduce`, `compute` or `links` before each part, as
            often on every rank.

    Returns:
        The same findings on every rank, except for `seconds`.

    Raises:
        DistributedEnvironmentError: There are several ranks but no process group, or a number is not
            positive.
        RankTimeoutError: Ranks did not arrive in time.
        RankFailedError: Another rank failed.
    """
    for name, number in (("max_bytes", max_bytes), ("timeout", timeout)):
        if number is not None and not number > 0:
            raise DistributedEnvironmentError(f"{name}={number!r} must be positive, for example 60.")
    start = time.monotonic()

    def reach(phase: str) -> None:
        if on_phase is not None:
            on_phase(phase)

    reach("describe")
    report = report_rank(env)
    reach("barrier")
    barrier(env, timeout=timeout, tag="doctor")
    has_group = dist.is_available() and dist.is_initialized()
    all_reduce = [
        _measure_all_reduce(env, size, lambda: reach("all_reduce"))
        for size in (_sizes_for(env, max_bytes) if has_group else ())
    ]
    reach("compute")
    own = asdict(check_device(report, env.device))
    reports = [RankReport(**told) for told in gather_objects(own, env)]
    hosts = [each.host for each in reports]
    links = measure_pairs(env, hosts, lambda: reach("links"), max_bytes) if env.world_size > 1 else []
    slow, too_slow = find_slow_devices(reports)
    return Diagnosis(
        ranks=reports,
        all_reduce=all_reduce,
        links=links,
        warnings=[*find_warnings(reports, os.environ), *slow, *find_slow_links(links, reports)],
        problems=[
            *(
                f"all-reduce of {r.bytes} bytes gave a wrong sum on "
                f"{name_ranks(r.wrong_ranks, env.world_size)}."
                for r in all_reduce
                if r.wrong_ranks
            ),
            *find_wrong_devices(reports),
            *too_slow,
            *find_wrong_links(links, reports),
        ],
        seconds=time.monotonic() - start,
    )


def _sizes_for(env: DistributedEnvironment, largest: float | None) -> tuple[int, ...]:
    """Sizes in bytes to measure, none above `largest`."""
    sizes = _ACCELERATOR_SIZES if env.use_accelerator else _CPU_SIZES
    return tuple(size for size in sizes if largest is None or size <= largest) or sizes[:1]


def _measure_all_reduce(
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
    for _ in range(10 if size <= _KIBI**2 else 5):
        on_call()
        synchronize(env.device)
        start = time.perf_counter()
        dist.all_reduce(values)
        synchronize(env.device)
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
