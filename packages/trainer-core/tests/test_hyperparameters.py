"""Options of the optimizer at a resume: what the user changed wins, what the run changed is restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer_core import ConfigurationError, Trainer

MakeTrainer = Callable[..., Trainer]
SAVED = {
    "save_strategy": "steps",
    "save_steps": 2,
    "num_train_epochs": -1,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}
SAID = "in force from here on"


class Watch:
    """Keeps the options of the groups as training begins, without parameters and names."""

    def __init__(self) -> None:
        self.groups: list[dict[str, object]] = []

    def on_train_begin(
        self, args: object, state: object, control: object, *, optimizer: Optimizer, **_: object
    ) -> None:
        left_out = ("params", "param_names")
        self.groups = [{k: v for k, v in g.items() if k not in left_out} for g in optimizer.param_groups]

    def each(self, name: str) -> list[object]:
        return [group[name] for group in self.groups]


class Move:
    """Sets an option of every group at a step."""

    def __init__(self, step: int, **options: float) -> None:
        self.step, self.options = step, options

    def on_step_end(
        self, args: object, state: object, control: object, *, optimizer: Optimizer, **_: object
    ) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group.update(self.options)


Resumed = Callable[..., tuple[Watch, list[str]]]


@pytest.fixture
def resumed(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> Resumed:
    """Trains to step 4, and from there to 6 with other settings; gives what the second start found."""

    def run(
        before: dict[str, object], after: dict[str, object], callbacks: Iterable[object] = ()
    ) -> tuple[Watch, list[str]]:
        make_trainer(**{**SAVED, "max_steps": 4, **before}, callbacks=list(callbacks)).train()
        caplog.clear()
        watch = Watch()
        again = make_trainer(**{**SAVED, "max_steps": 6, **after}, callbacks=[watch])
        assert again.train().global_step == 6
        assert again.state.session_start_step == 4
        return watch, [record.message for record in caplog.records if SAID in record.message]

    return run


def groups(**options: object) -> dict[str, object]:
    return {"with_trainer": {"optimizer_groups": {"mix.*": options}}}


def factory(**options: float) -> dict[str, object]:
    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(list(named), **options)

    # The trainers of the fixture give a learning rate, which has no place beside an optimizer of one's own.
    return {"with_trainer": {"optimizer_factory": make}, "learning_rate": 5e-5}


def test_a_rate_changed_in_optimizer_groups_wins(resumed: Resumed) -> None:
    watch, said = resumed(groups(lr=1e-2), groups(lr=1e-3))
    assert watch.each("lr").count(1e-3) == 2  # with and without decay
    assert len(said) == 1
    assert "initial_lr" in said[0]
    assert "0.01 before, 0.001 now" in said[0]


# The warnings of these tests differ in their numbers: a warning is given once per process, word for word.
@pytest.mark.parametrize(("schedule", "share"), [("constant", 1.0), ("inverse_sqrt", 2**-0.5)])
def test_a_rate_changed_in_a_factory_wins_and_the_schedule_keeps_its_place(
    resumed: Resumed, schedule: str, share: float
) -> None:
    before, after = 0.5 * share, 0.25 * share
    options = {"timescale": 4} if schedule == "inverse_sqrt" else {}
    kind = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options}
    watch, said = resumed({**factory(lr=before), **kind}, {**factory(lr=after), **kind})
    assert watch.each("lr") == [pytest.approx(after * share)]
    assert watch.each("initial_lr") == [after]
    assert len(said) == 1


def test_another_option_of_a_factory_wins(resumed: Resumed) -> None:
    watch, said = resumed(factory(lr=0.1, momentum=0.9), factory(lr=0.1, momentum=0.5))
    assert watch.each("momentum") == [0.5]
    assert "momentum of optimizer group 0: 0.9 before, 0.5 now" in said[0]


@pytest.mark.parametrize("options", [{"weight_decay": 0.25}, {"lr": 0.125}])
def test_what_a_callback_moved_is_restored_and_nothing_said(
    resumed: Resumed, options: dict[str, float]
) -> None:
    # Without a schedule, which would move the rate itself.
    settings = {"lr_scheduler_type": ""}
    watch, said = resumed(settings, settings, [Move(3, **options)])
    for name, value in options.items():
        assert set(watch.each(name)) == {value}
    assert said == []


def test_only_what_the_user_changed_wins_over_what_a_callback_moved(
    resumed: Resumed,
) -> None:
    lower = {"learning_rate": 4e-3, "allow_changes": ("learning_rate",)}
    watch, said = resumed({"learning_rate": 1e-2}, lower, [Move(3, weight_decay=0.25, eps=1e-3)])
    assert set(watch.each("lr")) == {4e-3}
    assert set(watch.each("weight_decay")) == {0.25}
    assert set(watch.each("eps")) == {1e-3}
    assert len(said) == 1


def test_a_change_in_one_group_leaves_the_others(resumed: Resumed) -> None:
    watch, _ = resumed(groups(lr=1e-2), groups(lr=2e-3), [Move(3, weight_decay=0.25)])
    assert set(watch.each("weight_decay")) == {0.25}


def test_settings_of_the_optimizer_change_only_where_that_is_allowed(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, object] = SAVED | {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
        "save_total_limit": None,
    }
    make_trainer(**settings, max_steps=8, callbacks=[StopAt(4)]).train()
    changed = settings | {"max_steps": 8, "learning_rate": 5e-3, "adam_beta2": 0.9}
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(**changed, allow_changes=("weight_decay",)).train()
    assert "adam_beta2=0.9 was 0.999 when the checkpoint was saved" in str(refused.value)
    allowed = ("weight_decay", "adam_beta2", "learning_rate")
    assert f"or set allow_changes={allowed!r} to use" in str(refused.value)

    watch = Watch()
    again = make_trainer(**changed, allow_changes=allowed, callbacks=[watch])
    again.train()
    assert set(watch.each("initial_lr")) == {5e-3}
    assert watch.each("betas") == [(0.9, 0.9)] * 2
    # Halfway along the cosine from the new rate to the floor, from the first step on.
    rates = [entry["learning_rate"] for entry in again.state.log_history if "learning_rate" in entry][4:]
    shares = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(4, 8)]
    assert rates == pytest.approx([1e-3 + share * 4e-3 for share in shares])
    assert "learning_rate: 0.01 before, 0.005 now" in caplog.text
    # From here on the new values are those of the run.
    make_trainer(**changed | {"max_steps": 9}).train()
    with pytest.raises(ConfigurationError, match=r"learning_rate=0\.01 was 0\.005"):
        make_trainer(**changed | {"max_steps": 10, "learning_rate": 1e-2}).train()


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        control.should_training_stop = state.global_step == self.step  # type: ignore[attr-defined]


class RateKept:
    """Keeps the learning rate of the last checkpoint."""

    def __init__(self) -> None:
        self.rate = 0.0

    def on_save(
        self, args: object, state: object, control: object, *, optimizer: Optimizer, **_: object
    ) -> None:
        self.rate = optimizer.param_groups[0]["lr"]


def test_the_reduced_rate_of_a_plateau_survives_a_change_of_the_decay(
    resumed: Resumed, ragged_loader: Callable[..., object]
) -> None:
    def plateau() -> dict[str, object]:
        return {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            # No loss is better by 10, so each evaluation but the first divides the rate by 10.
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_loader": ragged_loader(),
        }

    kept = RateKept()
    decay = {"weight_decay": 0.5, "allow_changes": ("weight_decay",)}
    watch, said = resumed(plateau(), {**plateau(), **decay}, [kept])
    assert kept.rate == pytest.approx(1e-2 * 0.1**3)
    assert set(watch.each("lr")) == {kept.rate}
    assert set(watch.each("initial_lr")) == {1e-2}
    assert sorted(set(watch.each("weight_decay"))) == [0.0, 0.5]
    assert len(said) == 1


def test_the_same_options_again_change_no_bit(
    make_trainer: MakeTrainer, curve: Callable[[Trainer], list[tuple[float, float]]]
) -> None:
    settings = {**SAVED, **groups(lr=1e-3, betas=(0.8, 0.95))}
    whole = make_trainer(max_steps=6, **{**settings, "save_strategy": "no", "save_steps": 500})
    whole.train()
    make_trainer(max_steps=4, **settings).train()
    rest = make_trainer(max_steps=6, **settings)
    rest.train()
    assert curve(rest) == curve(whole)
    for one, other in zip(
        rest.unwrapped_model().parameters(), whole.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("before", "after", "rate"),
    [
        ({"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "linear", "max_steps": 6}, 1 / 3),
        ({"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "constant"}, 1.0),
        (
            {"lr_scheduler_type": "linear", "max_steps": 8},
            {"lr_scheduler_type": "cosine", "max_steps": 16},
            0.853553,
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 8},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
            0.8,
        ),
    ],
    ids=["longer", "constant", "cosine", "warmup"],
)
def test_a_changed_schedule_holds_from_the_first_step(
    make_trainer: MakeTrainer, before: dict[str, object], after: dict[str, object], rate: float
) -> None:
    class Stop:
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            control.should_training_stop = state.global_step == 4  # type: ignore[attr-defined]

    settings = SAVED | {"learning_rate": 1e-2, "logging_steps": 1, "max_steps": 4}
    make_trainer(**settings | before, callbacks=[Stop()]).train()
    again = make_trainer(**settings | {"max_steps": 6} | after, callbacks=[])
    again.train()
    assert again.state.session_start_step == 4
    rates = {entry["step"]: entry["learning_rate"] for entry in again.state.log_history if "loss" in entry}
    assert rates[5] == pytest.approx(1e-2 * rate, rel=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["built in", "of torch"])
def test_a_fresh_optimizer_has_the_rate_of_the_step(make_trainer: MakeTrainer, own: bool) -> None:
    def decreasing(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    settings = SAVED | {"learning_rate": 1e-2, "logging_steps": 1, "max_steps": 4}
    settings |= {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 4}}
    if own:
        settings |= {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}}
        settings["with_trainer"] = {"lr_scheduler_factory": decreasing}
    first = make_trainer(**settings, callbacks=[])
    first.train()
    # As the error for other parameters advises.
    for file in Path(first.args.output_dir, "checkpoint-4").glob("optimizer.*"):
        file.unlink()
    again = make_trainer(**settings | {"max_steps": 6}, callbacks=[])
    again.train()
    rates = {entry["step"]: entry["learning_rate"] for entry in again.state.log_history if "loss" in entry}
    assert rates[5] == pytest.approx(1e-2 * (1 / 5 if own else 2**-0.5), rel=1e-5)
