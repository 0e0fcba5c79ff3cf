"""A run that stops and continues gives the curve of one that does not, whatever loader its data come from."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import build_loader
from trainer_core import Trainer, TrainerControl, TrainingArguments

ROWS, BATCH, EPOCHS = 6, 2, 2


def row(index: int) -> dict[str, Tensor]:
    ids = torch.arange(5) * (index + 1) % 23
    return {"input_ids": ids, "labels": ids}


class Indexed(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return row(index)


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(row, range(ROWS))


class Positioned(IterableDataset[dict[str, Tensor]]):
    """Keeps its own position."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.index < ROWS:
            self.index += 1
            yield row(self.index - 1)
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


LOADERS: dict[str, Callable[[], object]] = {
    "streamed": Streamed,
    "positioned": lambda: build_loader(Positioned(), BATCH),
    "torchdata": lambda: StatefulDataLoader(Positioned(), BATCH),
    "torchdata, streamed": lambda: StatefulDataLoader(Streamed(), BATCH),
    "torchdata, shuffled": lambda: StatefulDataLoader(Indexed(), BATCH, shuffle=True),
    "torchdata, generator": lambda: StatefulDataLoader(
        Indexed(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
}


class StopAt:
    def __init__(self, event: str, step: int) -> None:
        def stop(args: object, state: object, control: TrainerControl, **kw: object) -> None:
            control.should_training_stop |= state.global_step == step  # type: ignore[attr-defined]

        setattr(self, event, stop)


class EndEpochAt:
    """Ends the first epoch before its end."""

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
        control.should_epoch_stop |= state.global_step == 1  # type: ignore[attr-defined]


Curve = Callable[..., list[tuple[object, object]]]


@pytest.fixture
def make_curve(tmp_path: Path, tiny_model: Callable[[float], nn.Module]) -> Callable[[str, int], Curve]:
    """For the name of a loader and an accumulation: steps and losses of a run in a directory."""

    def of(name: str, accumulation: int, directory: str, *callbacks: object) -> list[tuple[object, object]]:
        torch.manual_seed(3)  # the shuffled one draws its seed when it is made
        trainer = Trainer(
            TrainingArguments(
                output_dir=str(tmp_path / directory),
                seed=5,
                use_cpu=True,
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=accumulation,
                num_train_epochs=EPOCHS,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                logging_steps=1,
            ),
            model_init=lambda: tiny_model(0.3),
            train_dataset=LOADERS[name](),
            callbacks=list(callbacks),
        )
        trainer.train()
        return [
            (entry["global_step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
        ]

    return lambda name, accumulation: partial(of, name, accumulation)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        *((name, 1) for name in LOADERS),
        *((name, 2) for name in ("streamed", "torchdata, shuffled")),
        *(
            pytest.param(name, 2, marks=pytest.mark.full)
            for name in ("positioned", "torchdata", "torchdata, streamed", "torchdata, generator")
        ),
    ],
)
def test_a_stop_anywhere_leaves_the_curve_as_it_is(
    name: str, accumulation: int, make_curve: Callable[[str, int], Curve]
) -> None:
    curve = make_curve(name, accumulation)
    whole = curve("whole")
    steps = len(whole)
    assert steps == EPOCHS * -(-ROWS // BATCH // accumulation)
    points = [("on_train_begin", 0), ("on_epoch_begin", 0), ("on_epoch_begin", steps // EPOCHS)]
    for event, step in [*points, *(("on_step_end", step) for step in range(1, steps))]:
        directory = f"{event}-{step}"
        curve(directory, StopAt(event, step))
        assert curve(directory) == whole, directory
    for step in range(1, steps):
        curve("many", StopAt("on_step_end", step))
    assert curve("many") == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_that_was_ended_early_is_not_taken_up_again(
    name: str, make_curve: Callable[[str, int], Curve]
) -> None:
    curve = make_curve(name, 1)
    whole = curve("whole", EndEpochAt())
    # A dataset that keeps its own position continues with the rest, in every run.
    assert len(whole) == (3 if name in ("positioned", "torchdata") else 4)
    for event, step in [("on_step_end", 1), ("on_epoch_end", 1), ("on_epoch_begin", 1), ("on_step_end", 2)]:
        directory = f"{event}-{step}"
        curve(directory, EndEpochAt(), StopAt(event, step))
        assert curve(directory, EndEpochAt()) == whole, directory


class Remembers:
    """A callback whose state is what it was given."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def state_dict(self) -> object:
        return self.kept

    def load_state_dict(self, state: object) -> None:
        self.kept = state


@pytest.mark.parametrize("kept", [OrderedDict(b=1, a=2), Counter("aab"), [1, 2], (3,), None])
def test_a_callback_gets_what_it_saved_of_the_type_that_it_had(
    make_trainer: Callable[..., Trainer], kept: object
) -> None:
    make_trainer(callbacks=[Remembers(kept)], max_steps=1, save_strategy="steps", save_steps=1).train()
    resumed = Remembers("nothing")
    make_trainer(callbacks=[resumed], max_steps=2).train()
    assert resumed.kept == kept
    assert type(resumed.kept) is type(kept)


def test_an_evaluation_loader_without_a_position_begins_by_itself(
    make_trainer: Callable[..., Trainer],
) -> None:
    class NoPosition(list[dict[str, Tensor]]):
        batch_size = BATCH

        def state_dict(self) -> None:
            return None

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError(f"it was given {state}")

    batch = {"input_ids": row(1)["input_ids"][None], "labels": row(1)["labels"][None]}
    trainer = make_trainer(eval_loader=NoPosition([batch]), max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2
