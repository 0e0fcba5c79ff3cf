"""Every part of the training data learns each epoch once, whatever stands between it and the trainer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import DataloaderDispatcher, SynchronizedDataLoader, build_loader
from trainer_core import Trainer, TrainerControl, TrainingArguments
from trainer_core.data.loaders import keeps_position

EXAMPLES = 24 * int(os.environ.get("PROPERTY_EXAMPLES", "1"))
CPU = torch.device("cpu")
ROWS, BATCH = 6, 2
STEPS = ROWS // BATCH


class Listener:
    """Remembers every epoch that it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Rows(Listener, Dataset[dict[str, Tensor]]):
    """Also remembers in which epoch each row was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[int | None] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.served.append(self.told[-1] if self.told else None)
        row = torch.arange(4) + index
        return {"input_ids": row, "labels": row}


class Stream(Rows, IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(ROWS))

    def __len__(self) -> int:
        return ROWS


class Places(Listener):
    """A sampler."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


class Batches(Listener, BatchSampler):
    def __init__(self, sampler: Places) -> None:
        Listener.__init__(self)
        BatchSampler.__init__(self, sampler, BATCH, False)


class Wrapper:
    """What a user puts around a loader."""

    def __init__(self, name: str, inner: object) -> None:
        setattr(self, name, inner)
        self.inner = inner
        self.batch_size = BATCH

    def __iter__(self) -> Iterator[object]:
        return iter(self.inner)  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        return STEPS


def training_data(choose: random.Random) -> tuple[object, Rows, list[Listener]]:
    """Something to train on, the rows in it, and all that is to be told."""
    rows = choose.choice((Rows, Stream))()
    streams, data = isinstance(rows, Stream), rows
    if not streams:
        data = choose.choice(
            (
                rows,
                Subset(rows, range(ROWS)),
                ConcatDataset([rows]),
                Subset(Subset(rows, range(ROWS)), range(ROWS)),
            )
        )
    kind = choose.choice(("dataset", "build_loader", "torch", "torchdata"))
    if kind == "dataset":
        return data, rows, [rows]
    listeners: list[Listener] = [rows]
    loader: object = build_loader(data, BATCH)  # type: ignore[arg-type]
    if kind != "build_loader":
        make = DataLoader if kind == "torch" else StatefulDataLoader
        options: dict[str, object] = {"batch_size": BATCH}
        how = "plain" if streams else choose.choice(("plain", "sampler", "batch_sampler", "inner sampler"))
        places = Places()
        if how == "sampler":
            options["sampler"] = places
            listeners.append(places)
        elif how == "batch_sampler":
            options = {"batch_sampler": (batches := Batches(places))}
            listeners.append(batches)  # it has set_epoch, so its sampler is its own business
        elif how == "inner sampler":
            options = {"batch_sampler": BatchSampler(places, BATCH, False)}
            listeners.append(places)
        loader = make(data, **options)
    wrappers = ("loader", "dataloader", "base_dataloader", "dispatcher", "synchronized")
    for name in choose.sample(wrappers, choose.randrange(3)):
        if name == "dispatcher":
            loader = DataloaderDispatcher(loader, None, CPU)  # type: ignore[arg-type]
        elif name == "synchronized":
            loader = SynchronizedDataLoader(loader, CPU)  # type: ignore[arg-type]
        else:
            loader = Wrapper(name, loader)
    return loader, rows, listeners


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
        control.should_training_stop |= state.global_step == self.step  # type: ignore[attr-defined]


@pytest.mark.parametrize("example", range(EXAMPLES))
def test_every_part_is_told_every_epoch_once(
    example: int, tmp_path: Path, tiny_model: Callable[[], torch.nn.Module]
) -> None:
    choose = random.Random(example)
    epochs = choose.randint(1, 3)
    limit = choose.choice((-1, choose.randint(1, epochs * STEPS)))
    total = epochs * STEPS if limit < 0 else limit
    stop = choose.choice((0, choose.randint(1, total)))
    evaluated = Rows()

    def run(seed: int, stop: int) -> tuple[object, Rows, list[Listener]]:
        data, rows, listeners = training_data(random.Random(seed))
        trainer = Trainer(
            TrainingArguments(
                output_dir=str(tmp_path),
                seed=1,
                per_device_train_batch_size=getattr(data, "batch_size", None) or BATCH,
                per_device_eval_batch_size=BATCH,
                num_train_epochs=epochs,
                max_steps=limit,
                eval_strategy="epoch",
                logging_strategy="no",
            ),
            model_init=tiny_model,
            train_dataset=data,
            eval_dataset=evaluated,
            callbacks=[StopAt(stop)],
        )
        trainer.train()
        return data, rows, listeners

    seed = choose.randrange(10**6)
    _, rows, listeners = run(seed, stop)
    begun = -(-(stop or total) // STEPS)
    for listener in listeners:
        assert listener.told == list(range(begun))
    assert (
        rows.served[: begun * ROWS]
        == [epoch for epoch in range(begun) for _ in range(ROWS)][: len(rows.served)]
    )
    if stop and stop < total:
        data, _, listeners = run(seed, 0)
        done = stop // STEPS
        expected = list(range(done, -(-total // STEPS)))
        for listener in listeners:
            # Without a position the epoch begins anew, and max_steps may end the run an epoch earlier.
            assert listener.told in ([expected] if keeps_position(data) else [expected, expected[:-1]])
    assert evaluated.told == []
