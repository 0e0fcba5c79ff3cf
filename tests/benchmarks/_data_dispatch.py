"""One rank loads for all: how fast batches reach the ranks, beside loading on every rank and beside peers.

Every measurement has ``[8, 512]`` int64 x 3 in a batch (98 kB), and as many batches in a step as there are
ranks. A contender is measured once in each round, in an order that moves on by one each round; what is
reported is the median over the rounds, and the median of the ratios to the contender measured beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _timing import Spread

LABELS = {
    "sharded": "a loader on every rank, no dispatch",
    "dispatcher": "dataloader_dispatch.DataloaderDispatcher",
    "accelerate": "Accelerate, dispatch_batches=True",
    "pickled": "pickled objects, broadcast_object_list",
}
SCENARIOS = {
    "free": "free data",
    "made": "5 ms per batch in worker processes",
    "made and used": "5 ms per batch in worker processes, 5 ms of use per step",
}
WORLDS = (2, 4)
ROUNDS = 5
METHOD = (
    "All ranks on one machine over gloo; a batch is [8, 512] int64 x 3. Free data: the loader hands out "
    "ready batches, so a loader on every rank does next to nothing. 5 ms per batch: the collate function "
    "sleeps for 5 ms in a worker process; a rank that loads for itself has one worker, a rank that loads for "
    "all has one for every rank; workers hand over tensors by torch's sharing strategy file_system. 5 ms of "
    "use: the training thread sleeps, as one that waits for an accelerator. Seconds are those of the slowest "
    "rank over all steps but the first few, from a common start. A wrong batch is an error."
)
_WORKER = Path(__file__).parent / "_data_dispatch_worker.py"
_SECONDS = 1200


def measure(*, rounds: int = ROUNDS, worlds: Sequence[int] = WORLDS, smoke: bool = False) -> dict[str, Any]:
    """Run all contenders.

    Args:
        rounds: Measurements of each contender.
        worlds: Numbers of ranks.
        smoke: A few steps only, to show that everything runs.

    Returns:
        ``{"method", "batches_per_second": {ranks: {scenario: {contender: [one a round]}}}}``, fit for JSON.
    """
    contenders = [name for name in LABELS if name != "accelerate" or importlib.util.find_spec("accelerate")]
    options = {"rounds": 1 if smoke else rounds, "smoke": smoke, "contenders": contenders}
    speeds = {str(world): _run(world, options) for world in worlds}
    return {"method": METHOD, "batches_per_second": speeds}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A table of a result: medians, lowest and highest, and ratios to Accelerate and to sharded loading."""
    table = [["dispatch", "ranks", "batches/s", "lowest", "highest", "x Accelerate", "x sharded"]]
    for world, scenarios in result["batches_per_second"].items():
        for scenario, speeds in scenarios.items():
            for name, values in speeds.items():
                spread = Spread.of(values)
                table.append(
                    [
                        f"{SCENARIOS[scenario]}: {LABELS[name]}",
                        world,
                        *(f"{value:.0f}" for value in (spread.median, spread.low, spread.high)),
                        _ratio(values, speeds.get("accelerate")),
                        _ratio(values, speeds["sharded"]),
                    ]
                )
    return table


def _ratio(values: Sequence[float], baselines: Sequence[float] | None) -> str:
    return f"{Spread.of_ratios(values, baselines).median:.3g}" if baselines else "-"


def _run(world: int, options: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Start the ranks of one job and return what its first rank measured."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dispatch-benchmark-") as folder:
        told = Path(folder) / "speeds.json"
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        command = [sys.executable, "-W", "ignore", str(_WORKER), json.dumps(options), str(told)]
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(world)
        ]
        try:
            codes = [process.wait(timeout=_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"a rank of the dispatch benchmark failed; exit codes {codes}")
        speeds: dict[str, dict[str, list[float]]] = json.loads(told.read_text())
        return speeds
