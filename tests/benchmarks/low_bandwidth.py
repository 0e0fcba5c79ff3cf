"""Compare low-bandwidth modes of DDPTrainer with ordinary DDP at equal tokens: held-out loss, and bytes sent.

    python tests/benchmarks/low_bandwidth.py --json low_bandwidth.json --plot low_bandwidth.png

Every mode trains the default model of llama-pretrain (preset tiny, bytes) on its default text (the Python
standard library) with its default schedule, on the same batches in the same order, with two ranks over gloo
on this machine, one thread each, one mode after the other. The loss is that on held-out documents; where
ranks differ, it is that of the mean of their weights. Every mode but the first ones trains as ordinary DDP
for the first tenth of the run. The row with other initial weights tells what differences mean nothing.

Counted bytes are the trainer's own (`communicated_bytes` of its log, less what evaluations add): tensors that
all ranks handed to collectives. Loopback bytes are those that passed the device lo meanwhile, on Linux. A
ring all-reduce among W ranks sends 2 (W - 1) / W times what it was handed, so with two ranks both are alike;
batches (rank 0 reads for all), flags and counts of each step, and headers come on top, alike in every mode.
DDP's broadcast of buffers is off: those of this model are tables of constants.
The device is shared: for figures of this study alone, let it run in a network of its own:

    unshare --map-root-user --net sh -c "ip link set lo up && python tests/benchmarks/low_bandwidth.py"

``--quick`` only shows that everything runs. ``--resume`` continues with a study that was cut short, and draws
one that is complete again. Nothing is asserted about the loss.
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

from _low_bandwidth_meter import loopback_bytes
from _low_bandwidth_modes import BASE, modes
from _low_bandwidth_report import plot, rows
from _timing import machine, print_table

WORLD_SIZE = 2
STEPS, QUICK_STEPS = 800, 60
EVALUATIONS = 4
QUICK_BATCHES = 2
"""Held-out batches of each rank in a quick run."""
QUICK_MODES = (BASE, "bf16", "powersgd", "post-local-8", "diloco-20")
SECONDS = 1800
"""Longest time of one run."""
_WORKER = Path(__file__).parent / "_low_bandwidth_worker.py"
_POLL_SECONDS = 0.1
_IDLE_SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = _parse(arguments)
    results = _begin(options)
    left = [name for name in options.only if name not in results["modes"]]
    began = time.monotonic()
    for number, name in enumerate(left, start=1):
        told = results["modes"][name] = _run(name, options)
        minutes = (time.monotonic() - began) / 60
        progress = f"[{minutes:5.1f} min] {number}/{len(left)} {name}: "
        print(f"{progress}held-out loss {told['curve'][-1][1]:.4f}", flush=True)
        _write(options, results)  # After every run: a long study that is cut short has told something.
    _write(options, results)
    print()
    print_table(rows(results))
    print(f"PowerSGD, PostLocalSGD and DiLoCo begin after step {modes(options.steps)['apart'].warm_up}.")
    if options.plot:
        plot(options.plot, results)


def _begin(options: argparse.Namespace) -> dict[str, Any]:
    """What is known before the first run: with ``--resume`` the runs that the JSON file holds."""
    results: dict[str, Any] = {
        "benchmark": "low_bandwidth",
        "machine": machine(Path.cwd(), ["torch"]),
        "ranks": options.ranks,
        "steps": options.steps,
        "seed": options.seed,
        "idle_loopback_bytes_per_second": _idle_loopback(),
        "modes": {},
    }
    if options.resume and options.json.exists():
        kept = json.loads(options.json.read_text())
        for key in ("ranks", "steps", "seed"):
            if kept[key] != results[key]:
                raise SystemExit(
                    f"{options.json} is of {key}={kept[key]}, not {results[key]}; name another file"
                )
        current = modes(options.steps)
        kept["modes"] = {
            name: {**told, "label": current[name].label, "told": current[name].told}
            for name, told in kept["modes"].items()
            if name in current and told["settings"] == current[name].as_json()
        }
        results = kept
    return results


def _write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Put the modes in order, and write the file that was asked for."""
    results["modes"] = {name: results["modes"][name] for name in modes(1) if name in results["modes"]}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of one run and return what the first one tells."""
    with tempfile.TemporaryDirectory(prefix="low-bandwidth-") as folder:
        told = Path(folder) / "told.json"
        asked = {
            "mode": name,
            "steps": options.steps,
            "evaluate_every": options.steps // EVALUATIONS,
            "evaluate_on": QUICK_BATCHES if options.quick else -1,
            "seed": options.seed,
            "directory": str(Path(folder) / "run"),
        }
        command = [sys.executable, "-W", "ignore", str(_WORKER), json.dumps(asked), str(told)]
        ranks = [subprocess.Popen(command, env=variables) for variables in _variables(options.ranks)]
        try:
            _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found: dict[str, Any] = json.loads(told.read_text())
        mode = modes(options.steps)[name]
        return {"label": mode.label, "told": mode.told, **found}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks.

    Raises:
        SystemExit: One of them failed, for which the others would wait, or took too long.
    """
    deadline = time.monotonic() + SECONDS
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        if time.monotonic() > deadline:
            raise SystemExit(f"a run of the study has taken more than {SECONDS} s")
        time.sleep(_POLL_SECONDS)
    if any(codes):
        raise SystemExit(f"a rank of the study failed; exit codes {codes}")


def _idle_loopback() -> float | None:
    """Bytes that others send in a second: what the loopback figures of the runs are wrong by."""
    before, began = loopback_bytes(), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    after = loopback_bytes()
    if before is None or after is None:
        return None
    return (after - before) / (time.monotonic() - began)


def _variables(ranks: int) -> list[Mapping[str, str]]:
    """The variables of each rank, as torchrun sets them."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(modes(STEPS))
    parser.add_argument("--only", help=f"comma-separated, of: {','.join(names)} (all)")
    parser.add_argument("--ranks", type=int, default=WORLD_SIZE, help="ranks (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of every run ({STEPS})")
    parser.add_argument("--seed", type=int, default=1, help="of weights and data (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them into this picture")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the JSON file holds")
    options = parser.parse_args(arguments)
    if options.resume and not options.json:
        parser.error("--resume needs --json, the file to continue with")
    if options.steps is None:
        options.steps = QUICK_STEPS if options.quick else STEPS
    if options.steps < 1 or options.steps % EVALUATIONS:
        parser.error(f"--steps must be a multiple of {EVALUATIONS}, the number of evaluations")
    if options.ranks < 2:
        parser.error("--ranks must be 2 or more")
    options.only = options.only.split(",") if options.only else list(QUICK_MODES if options.quick else names)
    if unknown := set(options.only) - set(names):
        parser.error(f"--only names {sorted(unknown)}; choose among {names}")
    if BASE not in options.only:
        parser.error(f"--only must name {BASE}, with which the others are compared")
    return options


if __name__ == "__main__":
    main()
