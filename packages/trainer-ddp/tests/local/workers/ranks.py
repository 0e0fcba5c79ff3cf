"""Starts worlds of ranks that share one import of torch, and writes down what each rank saw."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_world(
    world_size: int, directory: Path, scenarios: Callable[[Path], object], names: Sequence[str]
) -> None:
    """Run scenarios on several ranks, forked from this process, which never has a process group.

    Args:
        world_size: How many ranks.
        directory: Where `rank<k>.json` is written, with what each scenario returned.
        scenarios: Makes the object of one rank.
        names: Methods of that object, in order.
    """
    torch.set_num_threads(1)
    # DDP imports this when it is first constructed; once here is cheaper than once in each process.
    importlib.import_module("torch._dynamo")
    directory.mkdir()
    children = [_fork(rank, world_size, directory, scenarios, names) for rank in range(world_size)]
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"of {world_size} ranks, these failed: {failed}")


def _fork(
    rank: int, world_size: int, directory: Path, scenarios: Callable[[Path], object], names: Sequence[str]
) -> int:
    child = os.fork()
    if child == 0:
        _run_rank(rank, world_size, directory, scenarios, names)
        raise SystemExit(0)
    return child


def _run_rank(
    rank: int,
    world_size: int,
    directory: Path,
    scenarios: Callable[[Path], object],
    names: Sequence[str],
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(directory / "store"), world_size)
    timeout = timedelta(seconds=90)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timeout)
    subject = scenarios(directory)
    seen = {name: getattr(subject, name)() for name in names}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    del subject
    gc.collect()
    dist.destroy_process_group()
