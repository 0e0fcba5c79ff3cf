"""Starts ranks that share one import of torch, and writes down what each of them saw."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from ports import free_port
from torch.distributed import TCPStore

from dist_env import DistributedEnvInterface, DistributedEnvironment

_logger = logging.getLogger("ranks")

Scenario = Callable[[DistributedEnvInterface, Path], object]
"""Called with this rank's environment and a folder that all ranks share; returns what JSON can hold."""

LIMIT = 240
"""Seconds after which a rank that still runs is ended."""
TRAINING_TIMEOUT = 120
"""Seconds that a rank waits for another one; on a busy machine it may be late by most of a minute."""


def run_world(world_size: int, directory: Path, scenarios: Mapping[str, Scenario]) -> None:
    """Run scenarios on ranks that are forked from this process, which never has a process group.

    Args:
        world_size: How many ranks.
        directory: Where `rank-<k>.json` and, at the end, `codes.json` are written.
        scenarios: What to run, in this order.
    """
    torch.set_num_threads(1)
    # Stages import these when they are first used; once here is cheaper than in each rank.
    for name in ("torch.distributed.pipelining", "torch.utils.flop_counter"):
        importlib.import_module(name)
    gc.freeze()  # Collecting garbage then leaves out what was imported.
    directory.mkdir()
    port = free_port()
    # As torchrun does: the store of the job outlives its ranks, and so what they tell one another.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [_fork(rank, world_size, port, directory, scenarios) for rank in range(world_size)]
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    del store
    (directory / "codes.json").write_text(json.dumps({"codes": codes, "ended": time.time()}))


def _fork(rank: int, world_size: int, port: int, directory: Path, scenarios: Mapping[str, Scenario]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(LIMIT)
        _run_rank(rank, world_size, port, directory, scenarios)
        code = 0
    except BaseException:
        _logger.exception("rank %d of %d", rank, world_size)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(
    rank: int, world_size: int, port: int, directory: Path, scenarios: Mapping[str, Scenario]
) -> None:
    seen: dict[str, object] = {}
    with DistributedEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        master_addr="localhost",
        master_port=port,
        no_accelerator=True,
        training_timeout=TRAINING_TIMEOUT,
    ) as env:
        for name, scenario in scenarios.items():
            folder = directory / name.replace(" ", "-")
            began = time.perf_counter()
            try:
                seen[name] = scenario(env, folder)
            except Exception as error:
                _logger.exception("rank %d, scenario %s", env.rank, name)
                told = "".join(traceback.format_exception(error))
                seen[name] = {"error": f"{type(error).__name__}: {error}", "told": told, "time": time.time()}
                if len(scenarios) == 1:
                    raise  # With nothing left to do, the rank ends as a script would.
            finally:
                (directory / f"rank-{rank}.json").write_text(json.dumps(seen))
            if rank == 0:
                _logger.warning("scenario %s: %.2f s", name, time.perf_counter() - began)
