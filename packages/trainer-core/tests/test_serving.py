"""What is served between steps, in which order, and what a stop or an error leaves for the next start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from trainer_core import Trainer, TrainerControl

Handler = Callable[[TrainerControl], None]


class At:
    """Calls something at the n-th firing of an event, or at a step."""

    def __init__(self, event: str, step: int, act: Handler) -> None:
        self.step = step
        self.act = act
        self.done = False
        setattr(self, event, self.handle)

    def handle(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        if not self.done and state.global_step == self.step:  # type: ignore[attr-defined]
            self.done = True
            self.act(control)


def raise_flag(name: str) -> Handler:
    return lambda control: setattr(control, name, True)


def fail(control: TrainerControl) -> None:
    raise RuntimeError("a broken step")


def interrupt(control: TrainerControl) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def quiet_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))


def steps_of(trainer: Trainer, key: str) -> list[object]:
    return [entry["global_step"] for entry in trainer.state.log_history if key in entry]


SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, "num_train_epochs": 2}


def test_an_abort_while_logging_keeps_the_save_of_the_same_step_away(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    make_trainer(callbacks=[At("on_log_step", 4, raise_flag("should_abort_without_save"))], **SAVED).train()
    assert checkpoints(tmp_path / "run") == [2]


def test_a_save_asked_for_in_an_evaluation_is_of_that_step(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    settings = SAVED | {"save_steps": 1000, "eval_strategy": "steps", "eval_steps": 4}
    asks = At("on_evaluate", 4, raise_flag("should_save"))
    make_trainer(eval_loader=ragged_loader(seed=3), callbacks=[asks], **settings).train()
    assert checkpoints(tmp_path / "run") == [4, 12]


def test_a_step_is_evaluated_once(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    settings = SAVED | {"save_steps": 6, "eval_on_save": True, "eval_strategy": "epoch"}
    trainer = make_trainer(eval_loader=ragged_loader(seed=3), **settings)
    trainer.train()
    assert steps_of(trainer, "eval_loss") == [6, 12]


def test_a_stop_at_the_last_step_leaves_the_end_of_the_epoch_to_the_next_start(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    strategies = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch")
    settings = {**strategies, "num_train_epochs": 2}
    for stop in (12, None):
        callbacks = [] if stop is None else [At("on_step_end", stop, raise_flag("should_training_stop"))]
        trainer = make_trainer(eval_loader=ragged_loader(seed=3), callbacks=callbacks, **settings)
        trainer.train()
    assert steps_of(trainer, "eval_loss") == steps_of(trainer, "loss") == [6, 12]
    assert (trainer.state.epoch, trainer.state.raw_epoch) == (2.0, 2)


@pytest.mark.usefixtures("quiet_sigterm")
def test_a_signal_in_the_last_evaluation_asks_to_be_started_again(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    settings = SAVED | {
        "save_steps": 4,
        "eval_on_save": True,
        "preserve_best_model": True,
        "num_train_epochs": 1,
    }
    loader = ragged_loader(rows=12, seed=3)
    stopped = make_trainer(eval_loader=loader, callbacks=[At("on_prediction_step", 6, interrupt)], **settings)
    stopped.train()
    assert stopped.exit_code == 75
    again = make_trainer(eval_loader=ragged_loader(rows=12, seed=3), **settings)
    again.train()
    whole = make_trainer(
        eval_loader=ragged_loader(rows=12, seed=3), **settings, output_dir=again.args.output_dir + "2"
    )
    whole.train()
    assert steps_of(again, "eval_loss") == steps_of(whole, "eval_loss") == [4, 6]
    assert again.state.best_metric == whole.state.best_metric


def test_training_again_after_a_stop_reads_the_rest_of_the_data(
    tmp_path: Path, tiny_model: type[torch.nn.Module]
) -> None:
    seen: list[int] = []

    def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row[0] for row in rows])
        seen.extend(ids[:, 0].tolist())
        return {"input_ids": ids, "labels": ids}

    trainer = Trainer(
        {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, "save_strategy": "no", "seed": 1},
        model_init=tiny_model,
        train_dataset=TensorDataset(torch.arange(20).view(-1, 1).repeat(1, 6)),
        data_collator=collate,
        callbacks=[At("on_step_end", 3, raise_flag("should_training_stop"))],
    )
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 5
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize(
    "settings",
    [{}, {"fuse_optim_with_backward": True}, {"mixed_precision": "fp16"}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "in backward", "fp16", "accumulation"],
)
@pytest.mark.parametrize("event", ["on_forward_backward_end", "on_pre_optimizer_step", "on_optimizer_step"])
def test_a_broken_step_leaves_nothing_behind(
    make_trainer: Callable[..., Trainer], tmp_path: Path, event: str, settings: dict[str, object]
) -> None:
    shared = SAVED | settings | {"logging_steps": 3}
    broken = At(event, 3, fail)
    trainer = make_trainer(callbacks=[broken], **shared)
    with pytest.raises(RuntimeError, match="a broken step"):
        trainer.train()
    assert trainer.load_checkpoint()
    trainer.train()
    whole = make_trainer(**shared, output_dir=str(tmp_path / "whole"))
    whole.train()
    for key in ("loss", "grad_norm", "tokens", "total_tokens", "learning_rate"):
        assert [e.get(key) for e in trainer.state.log_history] == [
            e.get(key) for e in whole.state.log_history
        ]
    for one, other in zip(
        trainer.unwrapped_model().parameters(), whole.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_the_summary_counts_what_an_unsaved_run_did(
    make_trainer: Callable[..., Trainer],
) -> None:
    stop = At("on_step_end", 9, raise_flag("should_training_stop"))
    stopped = make_trainer(num_train_epochs=2, logging_steps=50, callbacks=[stop]).train().metrics
    whole = make_trainer(num_train_epochs=2, logging_steps=50, max_steps=9).train().metrics
    assert stopped["total_tokens"] == whole["total_tokens"]
    assert stopped["timed_steps"] == whole["timed_steps"] == 8


def test_an_epoch_can_be_left_out_before_its_first_step(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        num_train_epochs=2, callbacks=[At("on_epoch_begin", 0, raise_flag("should_epoch_stop"))]
    )
    trainer.train()
    assert (trainer.state.global_step, trainer.state.raw_epoch) == (6, 2)


def test_without_a_logging_strategy_nothing_is_logged(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(num_train_epochs=1, logging_strategy="no")
    trainer.train()
    assert not steps_of(trainer, "loss")
    assert trainer.state.num_target_tokens_seen > 0


@pytest.mark.parametrize(
    ("before", "now"),
    [("", "cosine"), ("cosine", ""), ("reduce_lr_on_plateau", "cosine"), ("cosine", "reduce_lr_on_plateau")],
)
def test_another_schedule_takes_over_at_its_step(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    tmp_path: Path,
    before: str,
    now: str,
) -> None:
    def run(name: str, directory: str, stop: int | None) -> Trainer:
        trainer = make_trainer(
            lr_scheduler_type=name,
            warmup_steps=0,
            eval_loader=ragged_loader(seed=3),
            eval_strategy="epoch",
            callbacks=[] if stop is None else [At("on_step_end", stop, raise_flag("should_training_stop"))],
            output_dir=str(tmp_path / directory),
            **SAVED,
        )
        trainer.train()
        return trainer

    run(before, "changed", 5)
    changed, expected = run(now, "changed", None), run(now, "from the start", None)
    rates = [[e["learning_rate"] for e in t.state.log_history if "loss" in e] for t in (changed, expected)]
    assert rates[0][6:] == pytest.approx(rates[1][6:])


def test_the_state_of_another_optimizer_is_refused(make_trainer: Callable[..., Trainer]) -> None:
    make_trainer(callbacks=[At("on_step_end", 3, raise_flag("should_training_stop"))], **SAVED).train()
    sgd = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    with pytest.raises(ValueError, match=r"optimizer='SGD' cannot load .* which was saved with AdamW"):
        make_trainer(learning_rate=5e-5, with_trainer=sgd, **SAVED).train()
