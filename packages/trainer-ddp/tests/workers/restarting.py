"""A rank that kills itself in the middle of a step, once; the job is started again and continues.

    restarting.py FOLDER KILL_AT

KILL_AT is the number of optimizer steps that are done when rank 1 dies; -1: it does not.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from tiny import RaggedLoader, TinyModel, digest, settings, write_notes

from dist_env import DistributedEnvironment, barrier
from trainer_ddp import DDPTrainer, DDPTrainingArguments


class KillOnce:
    """Sends SIGKILL to its process before a microbatch that is not the first of its step."""

    def __init__(self, rank: int, step: int, marker: Path) -> None:
        self.rank = rank
        self.step = step
        self.marker = marker
        self.microbatch = 0

    def on_step_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        self.microbatch = 0

    def on_forward_backward_begin(self, args: object, state: object, control: object, **kw: object) -> None:
        self.microbatch += 1
        due = state.global_step == self.step and self.microbatch == 2  # type: ignore[attr-defined]
        if due and self.rank == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kill_at: int) -> None:
    """Train to the end of the run, and write down what came out."""
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
        arguments = settings(
            str(folder / "run"),
            max_steps=14,
            gradient_accumulation_steps=2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            save_strategy="steps",
            save_steps=3,
        )
        trainer = DDPTrainer(
            DDPTrainingArguments(**arguments),  # type: ignore[arg-type]
            model_init=partial(TinyModel, dropout=0.2),
            train_dataset=RaggedLoader(),
            distributed_env=env,
            callbacks=[KillOnce(env.rank, kill_at, folder / "killed")],
        )
        trainer.train()
        kept = ("global_step", "loss", "grad_norm", "learning_rate", "tokens", "total_tokens")
        log = [[entry.get(name) for name in kept] for entry in trainer.state.log_history if "loss" in entry]
        notes = {
            "log": log,
            "weights": digest(trainer.unwrapped_model()),
            "began_at": trainer.state.session_start_step,
        }
        write_notes(notes, str(folder / f"final-{env.rank}.json"))
        barrier(env, timeout=30)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
