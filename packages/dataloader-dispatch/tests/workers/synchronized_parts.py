"""What the workers of the synchronized loaders share."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dataloader_dispatch import SynchronizedDataLoader
from dist_env import control_group

if "few" in sys.argv:
    control_group._MOST_CONNECTED = 1

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NOTE = Path(os.environ.get("NOTE", os.devnull))


class Batches:
    """So many batches of one row; it holds the rank and the batch's number."""

    def __init__(self, count: int, rank: int = RANK, killed_at: int | None = None) -> None:
        self.count = count
        self.rank = rank
        self.killed_at = killed_at

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.count):
            if number == self.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            row = torch.tensor([[self.rank, number]])
            yield {"input_ids": row, "labels": row.clone()}


class SizedBatches(Batches):
    """With a length."""

    def __len__(self) -> int:
        return self.count


class Log(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("dataloader_dispatch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def taken(self) -> list[str]:
        """The messages since the last time."""
        messages, self.messages = self.messages, []
        return messages


def outcome(action: Callable[[], Any]) -> Any:
    """What an action returns, or type and message of what it raises."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return [type(error).__name__, str(error)]


def numbers(loader: Any) -> list[int]:
    """The numbers of the batches of a pass, -100 for dummies."""
    return [int(batch["labels"][0, 1]) for batch in loader]


def lose(killed: int, at: int, batches: Batches, note: dict[str, object]) -> None:
    """Kill a rank while it loads one of its batches; note what the others see, and end."""
    batches.killed_at = at if killed == RANK else None
    loader = SynchronizedDataLoader(batches, "cpu", timeout_seconds=3)
    NOTE.write_text(json.dumps(note))
    start = time.monotonic()
    error = outcome(lambda: numbers(loader))
    NOTE.write_text(json.dumps({**note, "lost": error, "seconds": time.monotonic() - start}))
    (NOTE.parent / f"told-{RANK}").touch()
    # Rank 0 holds the store in which the others look for who is lost.
    others = [rank for rank in range(WORLD_SIZE) if rank != killed]
    while RANK == 0 and not all((NOTE.parent / f"told-{rank}").exists() for rank in others):
        time.sleep(0.05)
    os._exit(0)


def group_of(world: int) -> Any:
    """A group of the first ranks; all ranks make it, as torch asks for."""
    return dist.new_group(list(range(world)), backend="gloo")


def begin() -> None:
    """Open the process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
