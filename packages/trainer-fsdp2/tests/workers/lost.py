"""A rank that dies in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ranks import Scenario
from tiny import Batches, trainer_of

from dist_env import DistributedEnvInterface, RankFailedError

RANK, STEP = 1, 2


class Kill:
    """Sends SIGKILL to its process before a microbatch that is not the first of its step."""

    def __init__(self, rank: int, marker: Path) -> None:
        self.rank = rank
        self.marker = marker
        self.microbatch = 0

    def on_step_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        self.microbatch = 0

    def on_forward_backward_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        self.microbatch += 1
        due = state.global_step == STEP and self.microbatch == 2  # type: ignore[attr-defined]
        if due and self.rank == RANK:
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def killed(env: DistributedEnvInterface, folder: Path) -> object:
    """What the rank that is left sees, and how long after."""
    marker = folder.with_suffix(".killed")
    trainer = trainer_of(
        env,
        folder,
        train=Batches(96),
        callbacks=[Kill(env.rank, marker)],
        max_steps=8,
        gradient_accumulation_steps=2,
    )
    try:
        trainer.train()
    except RankFailedError as error:
        seconds = time.time() - marker.stat().st_mtime
        return {"error": f"{type(error).__name__}: {error}", "seconds": seconds}
    return {}


SCENARIOS: dict[str, Scenario] = {"killed": killed}
