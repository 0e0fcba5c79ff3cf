"""Which checkpoint is the best one, what is kept of it, and what is put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer_core import ConfigurationError, EarlyStopping, Trainer

TRACKED = {
    "max_steps": 12,
    "num_train_epochs": -1,
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": 2,
    "eval_steps": 2,
    "save_total_limit": 1,
    "learning_rate": 0.5,  # high enough for the evaluation to get worse at some point
}


def losses_by_step(trainer: Trainer) -> dict[int, float]:
    log = trainer.state.log_history
    return {int(e["global_step"]): float(e["eval_loss"]) for e in log if "eval_loss" in e}  # type: ignore[call-overload, arg-type]


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))


def test_the_best_checkpoint_is_kept_and_its_weights_alone_are_put_back(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    trainer = make_trainer(eval_loader=ragged_loader(seed=5), load_best_model_at_end=True, **TRACKED)
    trainer.train()
    losses = losses_by_step(trainer)
    best = min(losses, key=lambda step: losses[step])
    assert best != 12, "the last step is the best one: this test needs another learning rate"
    assert checkpoints(tmp_path / "run") == sorted({best, 12})
    assert trainer.state.best_metric == losses[best]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best}")
    assert trainer.state.global_step == 12
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


def test_preserved_checkpoints_are_counted_apart_and_survive_a_restart(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    settings = TRACKED | {"preserve_best_model": True, "preserve_n_best": 2}
    make_trainer(eval_loader=ragged_loader(seed=5), **(settings | {"max_steps": 8})).train()
    again = make_trainer(eval_loader=ragged_loader(seed=5), **settings)
    again.train()
    losses = losses_by_step(again)
    two_best = sorted(losses, key=lambda step: losses[step])[:2]
    # Besides the best ones: the one that was resumed from, and one more, the newest of the others.
    assert checkpoints(tmp_path / "run") == sorted({*two_best, 8, 10, 12})


def test_every_checkpoint_can_have_its_own_evaluation(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    settings = TRACKED | {"eval_strategy": "no", "eval_on_save": True, "save_steps": 5}
    trainer = make_trainer(eval_loader=ragged_loader(seed=5), preserve_best_model=True, **settings)
    trainer.train()
    assert sorted(losses_by_step(trainer)) == [5, 10, 12]


def test_an_unknown_metric_is_an_error_before_any_work(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    with pytest.raises(ConfigurationError, match=r"best_model_metric='eval_accuracy'.*eval_loss"):
        make_trainer(
            eval_loader=ragged_loader(seed=5),
            preserve_best_model=True,
            best_model_metric="accuracy",
            best_model_greater_is_better=True,
            **TRACKED,
        )


def test_several_sets_are_scored_one_by_one_and_one_of_them_ranks(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    sets = {"one": ragged_loader(seed=5), "two": ragged_loader(rows=7, seed=6)}
    stopping = EarlyStopping(metric="two_loss", patience=9)
    trainer = make_trainer(
        eval_loader=sets,
        callbacks=[stopping],
        preserve_best_model=True,
        best_model_metric="eval_two_loss",
        with_trainer={"eval_metrics": {"accuracy": accuracy}},
        **TRACKED,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_one_loss" in entry]
    assert [entry["global_step"] for entry in entries] == [2, 4, 6, 8, 10, 12]
    kinds = ("loss", "tokens", "accuracy", "seconds")
    assert {f"eval_{name}_{kind}" for name in sets for kind in kinds} < set(entries[0])
    assert not {"eval_loss", "eval_tokens"} & set(entries[0])
    best = min(float(entry["eval_two_loss"]) for entry in entries)
    assert trainer.state.best_metric == best
    assert stopping.best == best
    found = trainer.evaluate({"other": sets["one"]})
    alone = trainer.evaluate(sets["one"])
    assert found["eval_other_loss"] == alone["eval_loss"] == trainer.evaluate()["eval_one_loss"]


@pytest.mark.parametrize(
    ("sets", "settings", "told"),
    [
        ({}, {}, "no evaluation set"),
        ({1: "a"}, {}, "must be a str"),
        ({"a": 1, "a_b": 2}, {}, "eval_a_b_loss twice"),
        ({"a": 1}, TRACKED | {"preserve_best_model": True}, "best_model_metric='eval_loss'.*eval_a_loss"),
    ],
)
def test_sets_that_cannot_be_told_apart_or_ranked_are_refused(
    make_trainer: Callable[..., Trainer], sets: object, settings: dict[str, object], told: str
) -> None:
    metrics = {"eval_metrics": {"b_loss": accuracy}}
    with pytest.raises(ConfigurationError, match=told):
        make_trainer(eval_loader=sets, with_trainer=metrics, **settings)


def accuracy(predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(predictions, Tensor)
    right = predictions[:, :-1].argmax(-1) == labels[:, 1:]
    counted = labels[:, 1:] != -100
    return (right & counted).sum(), counted.sum()


def test_metrics_of_ones_own_are_weighted_by_their_counts(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    data = ragged_loader(seed=5)
    trainer = make_trainer(
        eval_loader=data,
        preserve_best_model=True,
        best_model_metric="accuracy",
        best_model_greater_is_better=True,
        with_trainer={"eval_metrics": {"accuracy": accuracy}},
        **TRACKED,
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    with torch.no_grad():
        right, counted = accuracy(trainer.unwrapped_model()(data.ids), data.labels)  # type: ignore[attr-defined]
    assert found == pytest.approx(int(right) / int(counted))
    measured = [e["eval_accuracy"] for e in trainer.state.log_history if "eval_accuracy" in e]
    assert trainer.state.best_metric == max(measured[:-1])  # type: ignore[type-var]


def test_early_stopping_ends_with_the_best_weights(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    trainer = make_trainer(
        eval_loader=ragged_loader(seed=5),
        load_best_model_at_end=True,
        callbacks=[EarlyStopping(patience=2)],
        **TRACKED,
    )
    trainer.train()
    assert trainer.stop_cause is not None
    assert trainer.stop_cause.name == "early_stopping"
    assert trainer.exit_code == 0
    losses = losses_by_step(trainer)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)


class StopOnce:
    """Stops the run after a step, the first time."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            self.step = -1
            control.should_training_stop = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("further", [{}, {"ema_decay": 0.8}], ids=["weights", "average"])
def test_training_continues_from_its_last_weights_and_not_from_the_best(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    tmp_path: Path,
    further: dict[str, object],
) -> None:
    def trained(name: str, times: int) -> tuple[list[object], dict[str, Tensor]]:
        trainer = make_trainer(
            eval_loader=ragged_loader(seed=5),
            load_best_model_at_end=True,
            callbacks=[StopOnce(7)] if times > 1 else [],
            output_dir=str(tmp_path / name),
            **TRACKED | further,
        )
        for _ in range(times):
            trainer.train()
            with pytest.raises(ConfigurationError, match=r"has the weights of .*checkpoint-"):
                trainer.save_checkpoint()
        assert trainer.state.global_step == 12
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, *losses_by_step(trainer).items()], trainer.unwrapped_model().state_dict()

    curve, weights = trained("whole", 1)
    again, weights_again = trained("stopped", 2)
    assert again == curve
    assert all(weights[name].equal(weights_again[name]) for name in weights)
