"""Measure what data-parallel training costs beside a bare DDP loop: CPU milliseconds per step, and steps/s.

    python tests/benchmarks/ddp.py --json ddp.json --plot ddp.png

Two ranks over gloo on this machine, one thread each. Every contender trains the same model on the same global
batches, in the same two processes; in each round all of them run once, in an order that moves on by one. A
run is a warm-up of 10 steps and some windows of 50 steps, each with one log entry. CPU time is that of a
process with all of its threads, as the mean of the ranks: waiting for the other rank costs next to none.

Each contender takes its batches as it usually does: from torch's DataLoader with a sampler that leaves each
rank its share (bare DDP, Accelerate, Fabric, Hugging Face Trainer, Lightning), from one loader on rank 0 that
hands them out (trainer-ddp), or from a loader of its own on each rank (trainer-ddp, no dispatch). "In
memory": batches made beforehand. ``--quick`` only shows that everything runs, at one size. Nothing is
asserted about time; a contender that ends elsewhere than the bare loop, or with other weights on another
rank, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _ddp_report import plot, rows
from _step_work import LOG_EVERY, SIZES, WARM_UP
from _timing import machine, print_table

DISTRIBUTIONS = ("torch", "accelerate", "transformers", "lightning")
WORLD_SIZE = 2
ROUNDS = 30
WINDOWS = {"nano": 6, "tiny": 1}
"""Of a run. Short ones at the larger size: what is compared has to be measured within few seconds."""
_WORKER = Path(__file__).parent / "_ddp_worker.py"
_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    results: dict[str, Any] = {
        "benchmark": "ddp",
        "machine": machine(Path.cwd(), DISTRIBUTIONS),
        "method": {
            "ranks": WORLD_SIZE,
            "backend": "gloo",
            "accumulation": options.accumulation,
            "warm_up_steps": WARM_UP,
            "window_steps": LOG_EVERY,
            "threads": 1,
        },
        "sizes": _measure(options),
    }
    for name, result in results["sizes"].items():
        print()
        print_table(rows(result["contenders"], name))
        print(_agreement_line(result["agreement"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(options.plot, results["sizes"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and return what the first one tells."""
    with tempfile.TemporaryDirectory(prefix="ddp-benchmark-") as folder:
        told = Path(folder) / "told.json"
        asked = {
            name: {
                "rounds": 0 if options.quick else options.rounds,
                "windows": 1 if options.quick else options.windows or WINDOWS[name],
                "accumulation": options.accumulation,
                "directory": folder,
            }
            for name in options.only
        }
        command = [sys.executable, "-W", "ignore", str(_WORKER), json.dumps(asked), str(told)]
        ranks = [subprocess.Popen(command, env=variables) for variables in _variables()]
        try:
            _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found: dict[str, Any] = json.loads(told.read_text())
        return found


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks.

    Raises:
        SystemExit: One of them failed. The others would wait for it.
    """
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        time.sleep(_POLL_SECONDS)
    if any(codes):
        raise SystemExit(f"a rank of the benchmark failed; exit codes {codes}")


def _agreement_line(agreed: Mapping[str, Any]) -> str:
    told = ", ".join(f"{kind} {value:.1e} ({label})" for kind, (value, label) in agreed["largest"].items())
    return f"largest deviation from the bare loop after {agreed['steps']} steps: {told}"


def _variables() -> list[Mapping[str, str]]:
    """The variables of each rank, as torchrun sets them."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD_SIZE)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated, of: {','.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds at each size (%(default)s)")
    parser.add_argument("--windows", type=int, help="windows of 50 steps in a run, instead of 6 and 1")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches of a step (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="only the round that checks, at one size: does it run?"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    options = parser.parse_args(arguments)
    smoke = list(SIZES)[:1] if options.quick else list(SIZES)
    options.only = options.only.split(",") if options.only else smoke
    if unknown := set(options.only) - set(SIZES):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(SIZES)}")
    for name in ("rounds", "windows", "accumulation"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return options


if __name__ == "__main__":
    main()
