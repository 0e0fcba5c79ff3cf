"""Two ranks, one of which is killed in the middle of a save or a load; the other says which."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bad_input_group import Ranks, State, component

from checkpoint_core import CheckpointError, CheckpointManager, SharingPattern

P = SharingPattern
TIMEOUT = 4.0
ELEMENTS = 8_000_000
"""Of the tensor that a killed rank writes; 32 MB take longer than it takes to send a signal."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_when(directory: Path, pattern: str) -> None:
    """Kill this process as soon as a file appears."""

    def watch() -> None:
        while not list(directory.glob(pattern)):
            time.sleep(0.0005)
        kill()

    threading.Thread(target=watch, daemon=True).start()


class Kill(Ranks):
    """Step 1 is saved; then a rank dies.

    Args:
        rank: The rank.
        directory: For everything that is written.
        phase: When: ``capture``, ``write``, ``background`` or ``load``.
        victim: Who.
    """

    def __init__(self, rank: int, directory: Path, phase: str, victim: int) -> None:
        super().__init__(rank, directory)
        self.run = directory / "run"
        self.phase = phase
        self.victim = victim
        self.own = State(rank=rank)
        self.components = [
            component("single", State(n=1), P.GLOBAL),
            component("own", self.own, P.PER_RANK),
        ]

    def scenarios(self) -> None:
        with self.manager(self.components, self.run) as manager:
            manager.save_checkpoint(1)
        short = self.manager(
            self.components, self.run, timeout_seconds=TIMEOUT, async_save=self.phase == "background"
        )
        dist.barrier()
        if self.rank == self.victim:
            self.prepare()
        began = time.monotonic()
        self.seen["killed"] = {"message": self.error(short)}
        self.seen["killed"]["seconds"] = time.monotonic() - began
        self.seen["afterwards"] = {"message": self.error(short)}
        self.seen["killed"]["left"] = sorted(path.name for path in self.run.iterdir())
        short.close()

    def prepare(self) -> None:
        if self.phase == "capture":
            self.own.on_save = kill
        elif self.phase == "load":
            self.own.on_load = kill
        else:
            self.own.values["tensor"] = torch.zeros(ELEMENTS)
            kill_when(self.run, f".tmp-checkpoint-2-*/own.rank{self.victim}.safetensors")

    def error(self, manager: CheckpointManager) -> str | None:
        try:
            if self.phase == "load":
                manager.load_checkpoint()
            else:
                manager.save_checkpoint(2)
                manager.wait()
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return None
