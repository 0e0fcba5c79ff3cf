"""Ranks that exchange small messages over a ControlGroup, and lose one of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dist_env import ControlGroup, DistributedEnvironment, RankFailedError, barrier

notes: dict[str, Any] = {}


def note(key: str, error: BaseException) -> None:
    rank = error.rank if isinstance(error, RankFailedError) else "none"
    notes[key] = [type(error).__name__, str(error), rank, time.time()]


def unreadable(key: str, group: ControlGroup, sent: bytes) -> None:
    """The last rank sends something else than a value; the others say what they are told."""
    if group.index == group.size - 1:
        own = torch.frombuffer(bytearray(sent.ljust(1024, b"\0")), dtype=torch.uint8)
        group.all_gather([torch.empty_like(own) for _ in group.ranks], own).wait()
        return
    try:
        group.gather(key, "own")
    except RankFailedError as error:
        note(key, error)


def trio(env: DistributedEnvironment) -> None:
    group = ControlGroup(range(3), 600.0, doing="starting")
    notes["names"] = [group.name(index) for index in range(3)]
    notes["short"] = group.gather("saying hello", {"rank": env.rank})
    notes["long"] = [len(text) for text in group.gather("sending", "x" * (1000 + 1_000_000 * env.rank))]
    barrier(env, process_group=group, timeout=60, tag="between")
    if env.rank != 1:
        pair = ControlGroup([0, 2], 600.0, doing="starting")
        notes["pair"] = pair.gather("pairing", env.rank)
        pair.close()
        try:
            pair.gather("pairing", 1)
        except RuntimeError as error:
            note("closed", error)
    unreadable("a huge size", group, (2**62).to_bytes(8, "big"))
    unreadable("no value", group, (3).to_bytes(8, "big") + b"???")
    number = b"i1;"
    unreadable("a longer value", group, (1 << 25).to_bytes(8, "big") + number)
    if env.rank == 1:
        notes["killed"] = time.time()
        write()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.gather("saving", env.rank)
    except RankFailedError as error:
        note("killed", error)


def failing(env: DistributedEnvironment) -> None:
    group = ControlGroup(range(2), 600.0, doing="starting")
    if env.rank == 1:
        group.close()
        time.sleep(1.0)
        raise OSError("no such disk")
    try:
        group.gather("saving", env.rank)
    except RankFailedError as error:
        note("failed", error)


def write() -> None:
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


try:
    with DistributedEnvironment(training_timeout=60) as environment:
        {"trio": trio, "failing": failing}[sys.argv[1]](environment)
finally:
    write()
