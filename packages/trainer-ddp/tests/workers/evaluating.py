"""Ranks that evaluate: data that rank 0 reads for all, and shards of their own, however unequal.

Rank 0 also scores the same batches alone, by `Trainer`, and writes down both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from ports import free_port
from tiny import LENGTH, VOCABULARY, RaggedLoader, TinyModel, settings, write_notes
from torch import Tensor
from torch.utils.data import Dataset

from dataloader_dispatch import shard_for_evaluation
from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    broadcast_object,
)
from trainer_core import DataError, Trainer, TrainingArguments
from trainer_ddp import DDPTrainer, DDPTrainingArguments

Row = dict[str, Tensor]
SIZES = (3, 1, 4, 2, 3)
"""Rows of the batches."""
SHARD_SIZE = 2


class Examples(Dataset[Row]):
    """Rows whose first label is their number: no loss counts it, as nothing predicts the first token."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (sum(SIZES), LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> Row:
        labels = self.tokens[number].clone()
        labels[1 + number % LENGTH :] = -100
        labels[0] = number
        return {"input_ids": self.tokens[number], "labels": labels}


class Batches:
    """A loader of batches that are ready."""

    batch_size = 1

    def __init__(self, batches: Sequence[Row]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.batches)


class Untouchable(Batches):
    """What ranks hold whose loader is not theirs to read."""

    def __init__(self) -> None:
        super().__init__([])

    def __iter__(self) -> Iterator[Row]:
        raise RuntimeError("only rank 0 reads data that is dispatched")


class Accuracy:
    """Share of the counted tokens that were predicted."""

    def __call__(self, predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(predictions, Tensor)
        targets = labels[:, 1:]
        right = (predictions[:, :-1].argmax(dim=-1) == targets) & (targets != -100)
        return right.sum(), (targets != -100).sum()


class MeanNumber:
    """Mean of the numbers of all examples; it remembers those that it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
        numbers = labels[:, 0][labels[:, 0] != -100]
        self.seen += numbers.tolist()
        return numbers.sum(), torch.tensor(len(numbers))


def whole(count: int) -> list[Row]:
    """The first so many batches."""
    examples, batches, start = Examples(), [], 0
    for size in SIZES[:count]:
        rows = [examples[number] for number in range(start, start + size)]
        batches.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        start += size
    return batches


def evaluate(env: DistributedEnvInterface, data: object, **options: object) -> dict[str, object]:
    """What a trainer of all ranks finds, twice, and which examples this rank saw the first time."""
    numbers = MeanNumber()
    torch.manual_seed(5)
    trainer = DDPTrainer(
        DDPTrainingArguments(**settings("unused", **options)),  # type: ignore[arg-type]
        model=TinyModel(),
        eval_dataset=data,
        eval_metrics={"accuracy": Accuracy(), "number": numbers},
        distributed_env=env,
        callbacks=[],
    )
    found = trainer.evaluate()
    seen = list(numbers.seen)
    again = trainer.evaluate()
    return {"found": found, "again": again, "seen": seen}


def alone(env: DistributedEnvInterface, data: object, **options: object) -> dict[str, object]:
    """What one process finds, which counts every example once; on rank 0 only."""
    if env.rank:
        return {}
    numbers = MeanNumber()
    torch.manual_seed(5)
    trainer = Trainer(
        TrainingArguments(**settings("unused", **options)),  # type: ignore[arg-type]
        model=TinyModel(),
        eval_dataset=data,
        eval_metrics={"accuracy": Accuracy(), "number": numbers},
        distributed_env=StaticDistributedEnvironment(),
        callbacks=[],
    )
    return {"found": trainer.evaluate(), "seen": numbers.seen}


def refused(env: DistributedEnvInterface, **options: object) -> str:
    """The message about a set without a batch."""
    try:
        evaluate(env, Batches([]), **options)
    except DataError as error:
        return str(error)
    return "not refused"


def without_an_example(env: DistributedEnvInterface, **options: object) -> str:
    """The message where one rank has none, and all have to say so."""
    try:
        evaluate(env, Examples() if env.rank else [], **options)
    except DataError as error:
        return str(error)
    return "not refused"


def named(env: DistributedEnvInterface, **options: object) -> list[dict[str, float]]:
    """Two sets at once, and each of them alone."""
    batches = whole(4)
    shards = [Batches(batches), Batches(batches[2:])]
    if options:
        shards = [Batches(shard.batches[env.rank :: env.world_size]) for shard in shards]
    trainer = DDPTrainer(
        DDPTrainingArguments(**settings("unused", **options)),  # type: ignore[arg-type]
        model=TinyModel(),
        eval_dataset={"one": shards[0], "two": shards[1]},
        distributed_env=env,
        callbacks=[],
    )
    return [trainer.evaluate(), trainer.evaluate(shards[0]), trainer.evaluate({"x": shards[1]})]


def eval_losses(env: DistributedEnvInterface, accumulation: int, **options: object) -> list[float]:
    """The losses of evaluations in the course of a training run."""
    data = RaggedLoader(rows=14, seed=1)
    # Ranks that train alone are runs of their own, and a directory belongs to one.
    folder = "unused" if env.world_size > 1 else f"unused-{os.environ['RANK']}"
    common = settings(folder, eval_strategy="steps", eval_steps=2, max_steps=6, **options)
    trainer = DDPTrainer(
        DDPTrainingArguments(**common, gradient_accumulation_steps=accumulation),  # type: ignore[arg-type]
        model_init=TinyModel,
        train_dataset=RaggedLoader(),
        eval_dataset=Batches(list(data)[env.rank :: env.world_size]) if options else data,
        distributed_env=env,
        callbacks=[],
    )
    trainer.train()
    return [float(entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]  # type: ignore[arg-type]


def score(env: DistributedEnvInterface) -> dict[str, object]:
    """Evaluate in every way."""
    notes: dict[str, object] = {}
    own = {"dispatch_eval_batches": False}
    rank, ranks = env.rank, env.world_size
    for count in range(1, len(SIZES) + 1):
        batches = whole(count)
        expected = alone(env, Batches(batches))
        dispatched = Batches(batches) if rank == 0 else Untouchable()
        notes[f"{count} dispatched"] = [expected, evaluate(env, dispatched)]
        notes[f"{count} own"] = [expected, evaluate(env, Batches(batches[rank::ranks]), **own)]
        lopsided = Batches(batches if rank == ranks - 1 else [])
        notes[f"{count} lopsided"] = [expected, evaluate(env, lopsided, **own)]
    shard = shard_for_evaluation(Examples(), rank, ranks)
    sizes = {"per_device_eval_batch_size": SHARD_SIZE}
    notes["dataset"] = [alone(env, Examples(), **sizes), evaluate(env, shard, **sizes, **own)]
    notes["nothing"] = [refused(env), refused(env, **own)]
    notes["without"] = without_an_example(env, **own)
    notes["named"] = [named(env), named(env, **own)]
    notes["in training"] = [
        [] if rank else eval_losses(StaticDistributedEnvironment(), ranks),
        eval_losses(env, 1),
        eval_losses(env, 1, dispatch_eval_batches=False),
    ]
    return notes


def main() -> None:
    """Evaluate on all ranks, and then on half of them."""
    notes: dict[str, object] = {}
    ranks = int(os.environ["WORLD_SIZE"])
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
        notes[str(ranks)] = score(env)
        port = broadcast_object(free_port(), env)
    half = str(ranks // 2)
    os.environ.update(WORLD_SIZE=half, LOCAL_WORLD_SIZE=half, MASTER_PORT=str(port))
    if int(os.environ["RANK"]) < ranks // 2:
        with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
            notes[half] = score(env)
    write_notes(notes)


if __name__ == "__main__":
    main()
