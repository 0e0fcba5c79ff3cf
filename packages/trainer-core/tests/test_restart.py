"""What a second start finds: other checkpoints, an epoch's end, changed settings, a broken terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dataloader_dispatch import DocumentStream, StreamLoader
from trainer_core import ConfigurationError, Trainer, TrainerControl

TEXTS = [f"text number {number} of some more of them" for number in range(12)]


def packed(seed: int = 0) -> DocumentStream:
    return DocumentStream(
        TEXTS, sequence_length=8, encode=lambda text: [ord(c) % 23 for c in text], eos_token_id=0, seed=seed
    )


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
        control.should_training_stop = state.global_step == self.step  # type: ignore[attr-defined]


def entries(trainer: Trainer) -> list[tuple[object, object, object]]:
    log = trainer.state.log_history
    return [
        (e["global_step"], e.get("loss"), e.get("eval_loss")) for e in log if "loss" in e or "eval_loss" in e
    ]


def test_an_epoch_end_at_a_stop_is_served_after_the_restart(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    rows = len(list(StreamLoader(packed(), 4)))

    def run(directory: str, callbacks: list[object]) -> Trainer:
        trainer = make_trainer(
            loader=StreamLoader(packed(), 4),
            eval_loader=StreamLoader(packed(1), 16),
            output_dir=str(tmp_path / directory),
            num_train_epochs=3,
            lr_scheduler_type="constant",
            warmup_steps=0,
            logging_strategy="epoch",
            eval_strategy="epoch",
            save_strategy="steps",
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    whole = entries(run("whole", []))
    assert [step for step, loss, _ in whole if loss is not None] == [rows, 2 * rows, 3 * rows]
    run("parts", [StopAt(rows)])
    assert entries(run("parts", [])) == whole


def test_an_epoch_stop_is_remembered_by_the_checkpoint_of_the_epoch(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    class StopEpochAt2:
        def on_step_end(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
            control.should_epoch_stop = state.global_step == 2  # type: ignore[attr-defined]

    class Die:
        def on_epoch_end(self, args: object, state: object, control: object, **kw: object) -> None:
            raise KeyboardInterrupt

    settings = {"num_train_epochs": 2, "save_strategy": "epoch", "output_dir": str(tmp_path / "run")}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(callbacks=[StopEpochAt2(), Die()], **settings).train()
    assert make_trainer(**settings).train().global_step == 2 + 6


def test_a_fresh_start_beside_other_checkpoints_is_refused_before_work(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    make_trainer(max_steps=2, save_strategy="steps").train()
    with pytest.raises(ConfigurationError, match=r"resume_from_checkpoint=False.*checkpoint-2"):
        make_trainer(max_steps=4, save_strategy="steps", resume_from_checkpoint=False).train()
    elsewhere = str(tmp_path / "run" / "checkpoint-2")
    moved = make_trainer(
        max_steps=4, save_strategy="steps", resume_from_checkpoint=elsewhere, output_dir=str(tmp_path / "new")
    )
    assert moved.train().global_step == 4
    assert moved.saved_step == 4


def test_only_training_takes_up_a_checkpoint_by_itself(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    trained = make_trainer(max_steps=6, save_strategy="steps")
    trained.train()
    other = make_trainer(max_steps=6, save_strategy="steps", eval_loader=ragged_loader())
    fresh = other.evaluate()["eval_loss"]
    assert other.load_checkpoint()
    assert other.state.global_step == 6
    assert other.evaluate()["eval_loss"] < fresh


def test_a_changed_step_size_is_refused_where_epochs_count_steps(
    make_trainer: Callable[..., Trainer],
) -> None:
    make_trainer(num_train_epochs=2, callbacks=[StopAt(8)], save_strategy="steps").train()
    with pytest.raises(ValueError, match=r"per_device_train_batch_size.*steps of 4 examples"):
        make_trainer(num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="steps").train()


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_an_epoch_continues_in_steps_of_another_size(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture, first: int, then: int
) -> None:
    """Half an epoch of 24 rows in batches of 4: as many steps were made as the whole has in larger ones."""
    settings = {"max_steps": 10, "save_strategy": "steps"}
    half = 3 if first == 1 else 2
    make_trainer(callbacks=[StopAt(half)], gradient_accumulation_steps=first, **settings).train()
    resumed = make_trainer(gradient_accumulation_steps=then, **settings)
    resumed.train()
    entries = [entry for entry in resumed.state.log_history if "loss" in entry]
    rows = [4 * first * number for number in range(1, half + 1)]
    while rows[-1] < 24:
        rows.append(min(rows[-1] + 4 * then, 24))
    assert [entry["epoch"] for entry in entries[: len(rows)]] == pytest.approx([row / 24 for row in rows])
    whole = make_trainer(max_steps=6, output_dir=f"{resumed.args.output_dir}-whole")
    whole.train()
    assert entries[len(rows) - 1]["total_tokens"] == whole.state.num_target_tokens_seen
    assert "promised" not in caplog.text


class CountsPasses:
    """As a dispatcher of rounds of which the last is not full: it has seen the end, and saves no epoch."""

    batch_size = 2

    def __init__(self) -> None:
        self.epoch = self.next = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.next, 3):
            self.next = (number + 1) % 3
            self.epoch += self.next == 0
            ids = torch.arange(8).view(2, 4) + number
            yield {"input_ids": ids, "labels": ids}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_an_epoch_whose_end_the_loader_has_seen_is_not_trained_again(
    make_trainer: Callable[..., Trainer], stop: int
) -> None:
    settings: dict[str, object] = {"num_train_epochs": 2, "save_strategy": "steps"}
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0}
    make_trainer(loader=CountsPasses(), callbacks=[StopAt(stop)], **settings).train()
    trainer = make_trainer(loader=CountsPasses(), **settings)
    assert trainer.train().global_step == 6
    assert trainer.state.epoch == 2.0


def test_train_again_after_a_stop_goes_on(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(num_train_epochs=1, callbacks=[StopAt(2)])
    assert trainer.train().global_step == 2
    assert trainer.train().global_step == 6
    assert trainer.stop_cause is None


def test_gradients_of_parameters_without_an_optimizer_do_not_pile_up(
    make_trainer: Callable[..., Trainer],
) -> None:
    def head_only(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for name, parameter in named if name.startswith("head")], lr=0.0)

    trainer = make_trainer(
        max_steps=5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        learning_rate=5e-5,
        with_trainer={"optimizer_factory": head_only},
    )
    trainer.train()
    every = make_trainer(max_steps=5, lr_scheduler_type="constant", warmup_steps=0, learning_rate=0.0)
    every.train()
    norms = [[e["grad_norm"] for e in t.state.log_history if "grad_norm" in e] for t in (trainer, every)]
    assert norms[0] == pytest.approx(norms[1])


def test_loaders_with_workers_shuffle_anew_each_epoch(make_trainer: Callable[..., Trainer]) -> None:
    ids = torch.arange(16).view(16, 1).repeat(1, 4)

    def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = torch.stack([row[0] for row in rows])
        return {"input_ids": batch, "labels": batch}

    loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True, num_workers=1, collate_fn=collate)
    orders: list[list[int]] = []

    class Watch:
        def on_epoch_begin(self, args: object, state: object, control: object, **kw: object) -> None:
            orders.append([])
            model = kw["model"]
            model._hook = model.register_forward_pre_hook(  # type: ignore[attr-defined]
                lambda module, args, kwargs: orders[-1].extend(kwargs["input_ids"][:, 0].tolist()),
                with_kwargs=True,
            )

        def on_epoch_end(self, args: object, state: object, control: object, **kw: object) -> None:
            kw["model"]._hook.remove()  # type: ignore[attr-defined]

    make_trainer(loader=loader, num_train_epochs=2, callbacks=[Watch()]).train()
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(16))
    assert orders[0] != orders[1]


def test_evaluation_of_the_training_data_is_repeatable_and_moves_nothing(
    make_trainer: Callable[..., Trainer],
) -> None:
    losses: list[float] = []
    data = packed()

    class Evaluate:
        def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
            kw["model"].dropout.eval()  # type: ignore[attr-defined]
            losses.append(kw["trainer"].evaluate(data)["eval_loss"])  # type: ignore[attr-defined]
            assert not kw["model"].dropout.training  # type: ignore[attr-defined]

    settings = {"num_train_epochs": -1, "max_steps": 4, "learning_rate": 0.0, "max_eval_steps": 1}
    watched = make_trainer(loader=StreamLoader(data, 2), callbacks=[Evaluate()], **settings)
    watched.train()
    alone = make_trainer(loader=StreamLoader(packed(), 2), **settings)
    alone.train()
    assert len(set(losses)) == 1
    assert [e for e in entries(watched) if e[1]] == entries(alone)


SCRIPT = """
import os, signal, sys
import torch
from trainer_core import Trainer, TrainingArguments

class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.next = torch.nn.Embedding(50, 50)
    def forward(self, input_ids):
        return self.next(input_ids)

class Interrupt:
    def on_step_end(self, args, state, control, **kw):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (64, 16))]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=50, num_train_epochs=-1, logging_steps=1)
callbacks = [*Trainer.default_callbacks(), Interrupt()]
Trainer(args, model_init=Bigram, train_dataset=data, callbacks=callbacks).train()
"""


def test_an_interrupt_saves_though_the_terminal_is_gone(tmp_path: Path) -> None:
    """`... 2>&1 | tee log` and Ctrl-C: the reader dies of the same signal."""
    reader = subprocess.Popen(["head", "-c1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert reader.stdin is not None
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        stdout=reader.stdin,
        stderr=reader.stdin,
        check=False,
        timeout=120,
    )
    assert (tmp_path / "run" / "checkpoint-3" / "manifest.json").is_file()
