"""One curve: accumulation, compilation, evaluation and restarts do not change it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core import Trainer

Curve = list[tuple[float, float]]


@pytest.fixture
def reference(make_trainer: Callable[..., Trainer], curve: Callable[[Trainer], Curve]) -> Curve:
    trainer = make_trainer(num_train_epochs=3)
    trainer.train()
    found = curve(trainer)
    assert len(found) == 18
    assert found[-1][0] < found[0][0]
    return found


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 2), (1, 4)])
def test_accumulation_keeps_the_curve(
    make_trainer: Callable[..., Trainer],
    curve: Callable[[Trainer], Curve],
    ragged_loader: Callable[..., object],
    reference: Curve,
    batch_size: int,
    accumulation: int,
) -> None:
    trainer = make_trainer(
        loader=ragged_loader(batch_size=batch_size),
        gradient_accumulation_steps=accumulation,
        num_train_epochs=3,
    )
    trainer.train()
    torch.testing.assert_close(torch.tensor(curve(trainer)), torch.tensor(reference), rtol=1e-5, atol=0)


def test_compilation_keeps_the_curve(
    make_trainer: Callable[..., Trainer], curve: Callable[[Trainer], Curve], reference: Curve
) -> None:
    trainer = make_trainer(num_train_epochs=3, torch_compile=True, torch_compile_backend="aot_eager")
    trainer.train()
    torch.testing.assert_close(torch.tensor(curve(trainer)), torch.tensor(reference), rtol=1e-5, atol=0)


def test_gradient_is_that_of_the_token_mean_over_the_window(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    tiny_model: type[torch.nn.Module],
) -> None:
    trainer = make_trainer(
        loader=ragged_loader(rows=7, batch_size=2), gradient_accumulation_steps=4, max_steps=1, warmup_steps=0
    )
    seen: list[float] = []

    class Norms:
        def on_train_metrics(self, args: object, state: object, control: object, **kw: torch.Tensor) -> None:
            seen.append(float(kw["grad_norm"]))

    trainer.add_callback(Norms())
    trainer.train()
    torch.manual_seed(7)
    model = tiny_model()
    data = ragged_loader(rows=7)
    logits = model(data.ids)  # type: ignore[attr-defined]
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), data.labels[:, 1:].flatten()).backward()  # type: ignore[attr-defined]
    by_hand = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert seen == [pytest.approx(by_hand.item(), rel=1e-5)]


def test_last_window_of_an_epoch_is_applied_with_its_own_count(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    trainer = make_trainer(
        loader=ragged_loader(rows=7, batch_size=1), gradient_accumulation_steps=4, num_train_epochs=2
    )
    assert trainer.train().global_step == 4
    assert trainer.state.num_target_tokens_seen == 2 * trainer.loss.count(ragged_loader(rows=7).labels).item()  # type: ignore[attr-defined]


def test_intervals_without_a_label_that_counts_are_told(
    make_trainer: Callable[..., Trainer], ragged_loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ragged_loader()
    loader.labels[8:16] = -100
    trainer = make_trainer(loader=loader, max_steps=6, logging_steps=2)
    trainer.train()
    tokens = [entry["tokens"] for entry in trainer.state.log_history if "loss" in entry]
    assert [count == 0 for count in tokens] == [False, True, False]
    told = [record.message for record in caplog.records if "no label counted" in record.message]
    assert len(told) == 1
    assert "in the last 2 optimizer steps" in told[0]


def test_evaluation_does_not_touch_training(
    make_trainer: Callable[..., Trainer],
    curve: Callable[[Trainer], Curve],
    ragged_loader: Callable[..., object],
) -> None:
    alone = make_trainer(num_train_epochs=2, dropout=0.3)
    alone.train()
    watched = make_trainer(
        num_train_epochs=2,
        dropout=0.3,
        eval_loader=ragged_loader(seed=5),
        eval_strategy="steps",
        eval_steps=2,
        max_eval_steps=3,
    )
    watched.train()
    assert curve(watched) == curve(alone)
    evaluations = [entry for entry in watched.state.log_history if "eval_loss" in entry]
    assert [entry["global_step"] for entry in evaluations] == [2, 4, 6, 8, 10, 12]
    assert len({entry["eval_tokens"] for entry in evaluations}) == 1


class StopAt:
    """Asks for an end after some step, by control or by a signal to this process."""

    def __init__(self, step: int, *, by_signal: bool) -> None:
        self.step = step
        self.by_signal = by_signal

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                control.should_training_stop = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("logging_steps", [1, 4])
@pytest.mark.parametrize("stops", [[1], [5, 6], [6, 12], [17]])
def test_resume_continues_the_curve_exactly(
    make_trainer: Callable[..., Trainer],
    curve: Callable[[Trainer], Curve],
    tmp_path: Path,
    stops: list[int],
    logging_steps: int,
) -> None:
    settings = {
        "dropout": 0.3,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "logging_steps": logging_steps,
    }
    whole = make_trainer(**settings, output_dir=str(tmp_path / "whole"))
    whole.train()
    for step in [*stops, None]:
        stop = [] if step is None else [StopAt(step, by_signal=step % 2 == 0)]
        part = make_trainer(**settings, output_dir=str(tmp_path / "parts"), callbacks=stop)
        output = part.train()
        assert output.global_step == (step or 18)
        assert (part.stop_cause is None) == (step is None)
    assert curve(part) == curve(whole)
    assert part.state.num_target_tokens_seen == whole.state.num_target_tokens_seen
    for one, other in zip(
        part.unwrapped_model().parameters(), whole.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(one, other)
