"""A rank whose device is planted to be wrong or slow, in the way that its first argument names."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_env import DistributedEnvironment, examine

FAULTY = 1
product, exchange = torch.matmul, dist.batch_isend_irecv
calls = 0


def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result = product(left, right)
    # One bit of one number, as a faulty unit flips it.
    result.view(torch.int32)[3, 5] ^= 1
    return result


def unsteady(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return wrong(left, right) if calls % 2 else product(left, right)


def slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        product(left, right)
    return product(left, right)


def corrupt(operations: list[Any]) -> list[dist.Work]:
    for operation in operations:
        if operation.op is dist.isend:
            operation.tensor[-1] += 1
    return exchange(operations)


def delay(operations: list[Any]) -> list[dist.Work]:
    time.sleep(0.15)
    return exchange(operations)


match sys.argv[1]:
    case _ if int(os.environ["RANK"]) != FAULTY:
        pass
    case "corrupt" | "delay" as name:
        dist.batch_isend_irecv = {"corrupt": corrupt, "delay": delay}[name]
    case name:
        torch.matmul = {"wrong": wrong, "unsteady": unsteady, "slow": slow}[name]

phases: list[str] = []
with DistributedEnvironment() as env:
    diagnosis = examine(env, max_bytes=65536, on_phase=phases.append)
notes = {"diagnosis": dataclasses.asdict(diagnosis), "phases": sorted(set(phases))}
Path(os.environ["NOTES"]).write_text(json.dumps(notes))
