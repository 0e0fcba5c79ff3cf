"""One epoch of documents that several trainers share: `handover.py FOLDER`, two ranks.

A run is a chain of sessions, each in the middle of the epoch where the one before has stopped. In a session
either both ranks read shards of their own, or rank 0 reads for both, or rank 0 trains alone by `Trainer`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny import settings, write_notes
from torch import Tensor, nn

from dataloader_dispatch import DocumentStream, TokenDocuments
from dist_env import DistributedEnvInterface, DistributedEnvironment, StaticDistributedEnvironment, barrier
from trainer_core import Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_ddp import DDPTrainer, DDPTrainingArguments

DOCUMENTS = 150
CHANGES = (5, 10)
"""Steps after which the next session takes over."""
RUNS = {
    "alone": ("alone",),
    "own, alone, own": ("own", "alone", "own"),
    "dispatched, own, dispatched": ("dispatched", "own", "dispatched"),
}


class NextToken(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DOCUMENTS + 1, 16)
        self.head = nn.Linear(16, DOCUMENTS + 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class NotingLoss:
    """Sum of the token losses; notes the tokens that count, the first of each row too."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def count(self, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum()

    def __call__(self, predictions: Tensor, labels: Tensor) -> Tensor:
        self.tokens += [token for token in labels.flatten().tolist() if token > 0]
        logits = predictions[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")


class Stop:
    """Ends the session at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kw: object) -> None:
        control.should_training_stop = state.global_step == self.step


def documents(rank: int, world_size: int) -> DocumentStream:
    return DocumentStream(
        TokenDocuments([[number + 1] * (2 + number % 4) for number in range(DOCUMENTS)]),
        sequence_length=8,
        eos_token_id=0,
        seed=5,
        shards=6,
        rank=rank,
        world_size=world_size,
    )


def train(env: DistributedEnvInterface, folder: Path, way: str, stop: int) -> Trainer:
    """One session of this rank."""
    own = way == "own"
    shared = {
        "model_init": NextToken,
        "train_dataset": documents(env.rank if own else 0, env.world_size if own else 1),
        "callbacks": [Stop(stop)],
        "compute_loss_func": NotingLoss(),
    }
    chosen = settings(
        str(folder),
        per_device_train_batch_size=4 if way == "alone" else 2,
        num_train_epochs=1,
        max_steps=-1,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=5,
    )
    if way == "alone":
        trainer = Trainer(
            TrainingArguments(**chosen), distributed_env=StaticDistributedEnvironment(), **shared
        )
    else:
        arguments = DDPTrainingArguments(**chosen, dispatch_batches=not own, uneven_batches="pad")
        trainer = DDPTrainer(arguments, distributed_env=env, **shared)
    trainer.train()
    tokens.append(shared["compute_loss_func"].tokens)
    return trainer


tokens: list[list[int]] = []


def main(folder: Path) -> None:
    """Train all runs, and write down what this rank saw."""
    notes: dict[str, object] = {}
    torch.set_num_threads(1)
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
        for name, ways in RUNS.items():
            tokens.clear()
            began, losses, positions = [], [], 0
            for way, stop in zip(ways, [*CHANGES[: len(ways) - 1], -1], strict=True):
                if way != "alone" or env.rank == 0:
                    trainer = train(env, folder / name, way, stop)
                    began.append(trainer.state.session_start_step)
                    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                    positions = trainer.state.num_input_tokens_seen
                barrier(env, timeout=60)
            notes[name] = {"tokens": list(tokens), "began": began, "losses": losses, "positions": positions}
    write_notes(notes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
