"""`python -m dist_env doctor`: look at the environment of every rank and try it out."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from dist_env.collectives import barrier, gather_objects
from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from dist_env.heartbeat import Heartbeat, StallReport
from dist_env.rank_report import RankReport, find_warnings, name_ranks, report_rank
from dist_env.tables import format_table

OK, PROBLEMS, USAGE = 0, 1, 2
PHASES = ("describe", "barrier", "all_reduce")
STALL_VARIABLE = "DIST_ENV_TEST_STALL"
_STALL_SECONDS = 60.0
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
    """Everything the doctor found.

    Attributes:
        ranks: What each rank says about itself.
        all_reduce: One result per size.
        warnings: Settings to look at.
        problems: Wrong results.
        seconds: Duration of the examination, from before the ranks met.
    """

    ranks: list[RankReport]
    all_reduce: list[AllReduceResult]
    warnings: list[str]
    problems: list[str]
    seconds: float


def run(options: argparse.Namespace) -> int:
    """Run the doctor on this rank.

    Returns:
        0 if all is well, 1 if there are problems, 2 if a variable or option is wrong.
    """
    try:
        stall = _parse_stall(os.environ.get(STALL_VARIABLE))
        env = DistributedEnvironment(
            backend=options.backend,
            no_accelerator=options.no_accelerator,
            init_timeout=options.timeout,
            log_level="WARNING",
        )
    except DistributedEnvironmentError as error:
        return _refuse(error, USAGE)
    start = time.monotonic()
    try:
        env.open()
    except DistributedEnvironmentError as error:
        return _refuse(error, USAGE)
    except (RankTimeoutError, RankFailedError) as error:
        return _refuse(error, PROBLEMS)
    try:
        with env:
            diagnosis = _examine(env, options, stall, start)
    except (RankTimeoutError, RuntimeError):
        if env.world_size == 1:
            raise
        # Leaving the environment has logged the error with rank and host.
        return PROBLEMS
    if env.rank == 0:
        print(_as_json(diagnosis) if options.json else _as_text(diagnosis), flush=True)
    return PROBLEMS if diagnosis.problems else OK


def _examine(
    env: DistributedEnvironment, options: argparse.Namespace, stall: tuple[int, str] | None, start: float
) -> Diagnosis:
    def end_of_stall(report: StallReport) -> None:
        if options.json:
            print(json.dumps({"ok": False, "stall": asdict(report)}), flush=True)
        # The main thread hangs in a collective, so only this thread can end the process.
        sys.stderr.flush()
        os._exit(PROBLEMS)

    with Heartbeat(env, stall_timeout=options.stall_timeout, interval=0.5, on_stall=end_of_stall) as heart:
        steps = itertools.count()

        def reach(phase: str) -> None:
            heart.beat(next(steps), phase)
            if stall == (env.rank, phase):
                time.sleep(_STALL_SECONDS)

        reach("describe")
        reports = [RankReport(**told) for told in gather_objects(asdict(report_rank(env)), env)]
        reach("barrier")
        barrier(env, timeout=options.timeout, tag="doctor")
        results = [
            _measure_all_reduce(env, size, lambda: reach("all_reduce"))
            for size in _sizes_for(env, options.max_bytes)
        ]
    problems = [
        f"all-reduce of {r.bytes} bytes gave a wrong sum on {name_ranks(r.wrong_ranks, env.world_size)}."
        for r in results
        if r.wrong_ranks
    ]
    return Diagnosis(
        ranks=reports,
        all_reduce=results,
        warnings=find_warnings(reports, os.environ),
        problems=problems,
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


def _refuse(reason: object, code: int) -> int:
    print(f"dist_env doctor: {' '.join(str(reason).split())}", file=sys.stderr, flush=True)
    return code


def _parse_stall(text: str | None) -> tuple[int, str] | None:
    """The test hook `DIST_ENV_TEST_STALL=RANK:PHASE`: that rank sleeps when it reaches that phase."""
    if text is None:
        return None
    rank, colon, phase = text.partition(":")
    if not colon or not rank.isdecimal() or phase not in PHASES:
        raise DistributedEnvironmentError(
            f"{STALL_VARIABLE}={text!r} is not RANK:PHASE with a phase of {', '.join(PHASES)}. Correct it "
            "or unset it."
        )
    return int(rank), phase


def _as_json(diagnosis: Diagnosis) -> str:
    return json.dumps({"ok": not diagnosis.problems, **asdict(diagnosis)}, indent=2)


def _as_text(diagnosis: Diagnosis) -> str:
    ranks = format_table(
        ("rank", "local", "host", "device", "backend", "python", "torch", "nccl", "interface"),
        [
            (
                r.rank,
                r.local_rank,
                r.host,
                r.device,
                r.backend,
                r.python,
                r.torch,
                r.collective_library,
                r.interface,
            )
            for r in diagnosis.ranks
        ],
        right=(0, 1),
    )
    speed = format_table(
        ("all-reduce", "time", "algorithm GB/s", "bus GB/s", "sum"),
        [
            (
                _size(r.bytes),
                f"{r.seconds * 1e6:.0f} us",
                _giga(r.algorithm_bandwidth),
                _giga(r.bus_bandwidth),
                "wrong" if r.wrong_ranks else "right",
            )
            for r in diagnosis.all_reduce
        ],
        right=(0, 1, 2, 3),
    )
    notes = [f"warning: {text}" for text in diagnosis.warnings]
    notes += [f"problem: {text}" for text in diagnosis.problems]
    verdict = "problems found" if diagnosis.problems else "healthy"
    end = f"{verdict}: {len(diagnosis.ranks)} rank(s) in {diagnosis.seconds:.1f} s"
    return "\n\n".join(part for part in (ranks, speed, "\n".join(notes), end) if part)


def _giga(number: float | None) -> str | None:
    return None if number is None else f"{number / 1e9:.3f}"


def _size(size: int) -> str:
    return f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
