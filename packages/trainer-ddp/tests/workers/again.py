"""A finished run that is started again, begun anew, and continued with another rate: `again.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny import VOCABULARY, TinyModel, digest, settings, write_notes

from dist_env import DistributedEnvironment
from trainer_ddp import DDPTrainer, DDPTrainingArguments


def main(folder: Path) -> None:
    """Train, and write down what came out of each start."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (20, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    notes: dict[str, object] = {}
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:

        def make(**more: object) -> DDPTrainer:
            usual = {"max_steps": 7, "num_train_epochs": None, "save_strategy": "steps"}
            chosen = settings(str(folder), **{**usual, **more})
            return DDPTrainer(
                DDPTrainingArguments(**chosen),  # type: ignore[arg-type]
                model_init=TinyModel,
                train_dataset=data,
                distributed_env=env,
                callbacks=[],
            )

        def note(name: str, trainer: DDPTrainer, *, fresh: bool = False) -> None:
            metrics = trainer.train(fresh=fresh).metrics
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            notes[name] = {
                "metrics": {key: metrics[key] for key in ("train_loss", "total_tokens", "timed_steps")},
                "losses": losses,
                "weights": digest(trainer.unwrapped_model()),
                "session": (trainer.state.session_start_step, trainer.state.global_step),
            }

        trainer = make()
        note("first", trainer)
        note("again", trainer)
        note("another", make())
        note("fresh", trainer, fresh=True)
        note("another fresh", make(), fresh=True)
        try:
            make(learning_rate=1e-3).train()
        except ValueError as error:
            notes["refused"] = str(error)
        changed = make(max_steps=9, learning_rate=1e-3, allow_changes=("learning_rate",))
        note("changed", changed)
        notes["rates"] = [e["learning_rate"] for e in changed.state.log_history if "loss" in e]
        try:
            changed.train(fresh=env.rank == 0)
        except ValueError as error:
            notes["unlike"] = str(error)
    write_notes(notes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
