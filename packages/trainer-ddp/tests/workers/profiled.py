"""A running job of which somebody wants a profile, twice: `profiled.py FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tiny import VOCABULARY, TinyModel, settings

from dist_env import DistributedEnvironment
from trainer_core import ExternalControl, ProfilerCallback, TrainerControl, TrainerState
from trainer_ddp import DDPTrainer, DDPTrainingArguments


class Asks:
    """Writes into the control file in step 3, and asks on rank 1 alone after step 9."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def on_step_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        if state.global_step == 2 and self.rank == 0:
            (self.folder / "control").write_text("profile")
        if self.rank == 1:
            time.sleep(0.03)

    def on_step_end(self, _: object, state: TrainerState, control: TrainerControl, **__: object) -> None:
        if state.global_step == 9 and self.rank == 1:
            control.should_profile = True


def main(folder: Path) -> None:
    """Train; every rank writes its traces."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (80, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
        chosen = settings(str(folder), max_steps=15, num_train_epochs=None)
        profiler = ProfilerCallback(repeat=0, warmup=1, active=3)
        DDPTrainer(
            DDPTrainingArguments(**chosen),  # type: ignore[arg-type]
            model_init=TinyModel,
            train_dataset=data,
            distributed_env=env,
            callbacks=[profiler, ExternalControl(every_seconds=0), Asks(folder, env.rank)],
        ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
