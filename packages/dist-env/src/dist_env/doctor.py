"""`python -m dist_env doctor`: look at the environment of every rank and try it out."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, replace

from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from dist_env.examination import PHASES, Diagnosis, examine
from dist_env.heartbeat import Heartbeat, StallReport
from dist_env.tables import format_table

OK, PROBLEMS, USAGE = 0, 1, 2
STALL_VARIABLE = "DIST_ENV_TEST_STALL"
_STALL_SECONDS = 60.0
_RESULTS = ("GFLOP/s", "checksum")
_SHOWN_LINKS = 6


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

        diagnosis = examine(env, max_bytes=options.max_bytes, timeout=options.timeout, on_phase=reach)
    return replace(diagnosis, seconds=time.monotonic() - start)


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
        ("rank", "local", "host", "device", "backend", "python", "torch", "nccl", "interface", *_RESULTS),
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
                None if r.matmul_flops is None else f"{r.matmul_flops / 1e9:.1f}",
                r.checksum and (r.checksum[:8] if r.repeatable else "varies"),
            )
            for r in diagnosis.ranks
        ],
        right=(0, 1, 9),
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
    slowest = sorted(diagnosis.links, key=lambda link: link.bandwidth)
    pairs = format_table(
        (f"slowest of {len(slowest)} links", "hosts", "size", "time", "GB/s", "data"),
        [
            (
                f"{link.ranks[0]}-{link.ranks[1]}",
                " ".join(dict.fromkeys(link.hosts)),
                _size(link.bytes),
                f"{link.seconds * 1e6:.0f} us",
                _giga(link.bandwidth),
                "wrong" if link.wrong_ranks else "right",
            )
            for link in slowest[:_SHOWN_LINKS]
        ],
        right=(0, 2, 3, 4),
    )
    notes = [f"warning: {text}" for text in diagnosis.warnings]
    notes += [f"problem: {text}" for text in diagnosis.problems]
    verdict = "problems found" if diagnosis.problems else "healthy"
    end = f"{verdict}: {len(diagnosis.ranks)} rank(s) in {diagnosis.seconds:.1f} s"
    return "\n\n".join(
        part for part in (ranks, speed, pairs if slowest else "", "\n".join(notes), end) if part
    )


def _giga(number: float | None) -> str | None:
    return None if number is None else f"{number / 1e9:.3f}"


def _size(size: int) -> str:
    return f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
