"""What all trackers do, shown by one that writes lines of JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.arguments.choices import TRACKERS, trackers_of
from trainer_core.callbacks import MLflowCallback, TensorBoardCallback, Tracker, WandbCallback
from trainer_core.callbacks.tracker import Opening

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]


class LinesTracker(Tracker):
    """Appends points to `<log directory>/<run id>.jsonl`."""

    name = "lines"
    library = "json"

    def open_run(self, opening: Opening) -> str:
        opening.directory.mkdir(parents=True, exist_ok=True)
        run_id = opening.run_id or f"run{len(list(opening.directory.glob('*.jsonl')))}"
        self.path = opening.directory / f"{run_id}.jsonl"
        if opening.run_id is None:
            self.path.write_text(json.dumps({"config": opening.config}) + "\n")
        return run_id

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **scalars}) + "\n")

    def close_run(self, *, aborted: bool) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"closed": True, "aborted": aborted}) + "\n")


class ForgettingTracker(LinesTracker):
    """One that could take points back."""

    takes_points_back = True


def points(path: Path) -> list[dict[str, float]]:
    return [entry for line in path.read_text().splitlines() if "step" in (entry := json.loads(line))]


def log_steps(tracker: Tracker, args: TrainingArguments, make_state: State, steps: range) -> None:
    """A part of a run that is killed after its last step."""
    control = TrainerControl()
    tracker.on_train_begin(args, make_state(steps.start - 1), control)
    for step in steps:
        tracker.on_log(args, make_state(step), control, logs={"loss": 1.0 / step, "epoch": 0.1})


def resumed(kind: type[Tracker], saved: Mapping[str, object], **given: str) -> Tracker:
    tracker = kind(**given)
    tracker.load_state_dict(json.loads(json.dumps(saved)))
    return tracker


def test_a_run_is_tracked_in_groups(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4),
        num_train_epochs=1,
        eval_strategy="epoch",
        callbacks=[LinesTracker()],
    )
    trainer.train()
    path = tmp_path / "run" / "run0.jsonl"
    first, *_, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["config"]["learning_rate"] == 1e-2
    assert last == {"closed": True, "aborted": False}
    logged = points(path)
    assert [point["step"] for point in logged] == [1, 2, 3, 4, 5, 6, 6, 6]
    history = trainer.state.log_history
    assert [point["train/loss"] for point in logged[:6]] == [entry["loss"] for entry in history[:6]]
    evaluation, final = logged[6:]
    assert evaluation["eval/loss"] == history[6]["eval_loss"]
    assert {name.split("/")[0] for name in evaluation} == {"step", "eval"}
    assert final["final/train_runtime"] > 0
    assert {name.split("/")[0] for name in final} == {"step", "final"}


def test_values_are_flattened(arguments: Arguments, state: State, tmp_path: Path) -> None:
    tracker = LinesTracker()
    record = {
        "loss": torch.tensor(2.0),
        "peak_mem": [5, 7],
        "mfu": None,
        "note": "text",
        "flag": True,
        "shares": {"wait": 0.5},
        "loads": {"layer": [0.5, 1.5]},
        "grad/embed": 1.5,
        "matrix": torch.zeros(2, 2),
    }
    tracker.on_train_begin(arguments(), state(), TrainerControl())
    tracker.on_log(arguments(), state(3), TrainerControl(), logs=record)
    assert points(tmp_path / "run" / "run0.jsonl") == [
        {
            "step": 3,
            "train/loss": 2.0,
            "train/peak_mem/rank0": 5.0,
            "train/peak_mem/rank1": 7.0,
            "train/shares/wait": 0.5,
            "grad/embed": 1.5,
        }
    ]


def test_a_resumed_run_goes_on_and_is_marked(arguments: Arguments, state: State, tmp_path: Path) -> None:
    args = arguments()
    tracker = LinesTracker()
    log_steps(tracker, args, state, range(1, 5))
    log_steps(resumed(LinesTracker, tracker.state_dict()), args, state, range(5, 8))
    logged = points(tmp_path / "run" / "run0.jsonl")
    assert [point["step"] for point in logged] == [1, 2, 3, 4, 5, 6, 7]
    assert [point.get("session/resumed_at_step") for point in logged] == [None] * 4 + [4.0, None, None]


def test_steps_beyond_the_checkpoint_are_not_logged_twice(
    arguments: Arguments, state: State, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments()
    tracker = LinesTracker()
    log_steps(tracker, args, state, range(1, 5))
    saved = tracker.state_dict()
    tracker.on_log(args, state(5), TrainerControl(), logs={"loss": 0.2})
    tracker.on_log(args, state(6), TrainerControl(), logs={"loss": 0.2})
    with caplog.at_level(logging.WARNING):
        log_steps(resumed(LinesTracker, saved), args, state, range(5, 9))
    logged = points(tmp_path / "run" / "run0.jsonl")
    assert [point["step"] for point in logged] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert logged[6]["session/resumed_at_step"] == 4.0
    assert "run run0 holds points up to step 6" in caplog.text


def test_a_tracker_that_takes_points_back_logs_them_anew(
    arguments: Arguments, state: State, tmp_path: Path
) -> None:
    args = arguments()
    tracker = ForgettingTracker()
    log_steps(tracker, args, state, range(1, 5))
    saved = {**tracker.state_dict(), "last_step": 2}
    log_steps(resumed(ForgettingTracker, saved), args, state, range(3, 5))
    assert [point["step"] for point in points(tmp_path / "run" / "run0.jsonl")] == [1, 2, 3, 4, 3, 4]


def test_a_torn_note_beside_the_logs_does_no_harm(arguments: Arguments, state: State, tmp_path: Path) -> None:
    args = arguments()
    tracker = LinesTracker()
    log_steps(tracker, args, state, range(1, 3))
    (tmp_path / "run" / "lines.run.json").write_text('{"run_id": "ru')
    log_steps(resumed(LinesTracker, tracker.state_dict()), args, state, range(3, 4))
    assert [point["step"] for point in points(tmp_path / "run" / "run0.jsonl")] == [1, 2, 3]


def test_a_chosen_run_is_not_that_of_the_checkpoint(
    arguments: Arguments, state: State, tmp_path: Path
) -> None:
    args = arguments()
    tracker = LinesTracker()
    log_steps(tracker, args, state, range(1, 5))
    other = resumed(LinesTracker, tracker.state_dict(), run_id="fork")
    log_steps(other, args, state, range(3, 5))
    assert other.run_id == "fork"
    assert [point["step"] for point in points(tmp_path / "run" / "fork.jsonl")] == [3, 4]


def test_without_a_checkpoint_a_run_of_its_own_begins(
    arguments: Arguments, state: State, tmp_path: Path
) -> None:
    for _ in range(2):
        log_steps(LinesTracker(), arguments(), state, range(1, 3))
    for run in ("run0", "run1"):
        assert [point["step"] for point in points(tmp_path / "run" / f"{run}.jsonl")] == [1, 2]


def test_an_evaluation_after_training_is_logged_too(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    trainer = make_trainer(max_steps=2, eval_loader=ragged_loader(rows=4), callbacks=[LinesTracker()])
    trainer.train()
    metrics = trainer.evaluate()
    last = points(tmp_path / "run" / "run0.jsonl")[-1]
    assert (last["step"], last["eval/loss"]) == (2, metrics["eval_loss"])


def test_other_ranks_write_nothing(arguments: Arguments, state: State, tmp_path: Path) -> None:
    tracker = LinesTracker()
    args, control = arguments(), TrainerControl()
    for_rank_1 = state(1, is_world_process_zero=False)
    tracker.on_train_begin(args, for_rank_1, control)
    tracker.on_log(args, for_rank_1, control, logs={"loss": 1.0})
    tracker.on_train_end(args, for_rank_1, control)
    assert not (tmp_path / "run").exists()


def test_an_aborted_run_is_closed_as_such(arguments: Arguments, state: State, tmp_path: Path) -> None:
    tracker = LinesTracker()
    control = TrainerControl(should_abort_without_save=True)
    tracker.on_train_begin(arguments(), state(), control)
    tracker.on_train_end(arguments(), state(1), control)
    assert json.loads((tmp_path / "run" / "run0.jsonl").read_text().splitlines()[-1])["aborted"]


def test_a_run_that_an_error_left_open_is_closed_first(
    arguments: Arguments, state: State, tmp_path: Path
) -> None:
    tracker = LinesTracker()
    log_steps(tracker, arguments(), state, range(1, 3))
    log_steps(tracker, arguments(), state, range(3, 4))
    entries = [json.loads(line) for line in (tmp_path / "run" / "run0.jsonl").read_text().splitlines()]
    assert entries[3] == {"closed": True, "aborted": True}
    assert [entry["step"] for entry in entries if "step" in entry] == [1, 2, 3]


def test_a_missing_library_is_named_with_its_extra() -> None:
    class Missing(LinesTracker):
        library = "no_such_tracker"

    with pytest.raises(ConfigurationError, match=r"pip install 'trainer-core\[no_such_tracker\]'"):
        Missing()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("none", ()),
        ((), ()),
        ("wandb", ("wandb",)),
        (" wandb, tensorboard,wandb", ("wandb", "tensorboard")),
        (["mlflow", "wandb"], ("mlflow", "wandb")),
    ],
)
def test_report_to_is_a_text_or_a_list(arguments: Arguments, given: object, names: tuple[str, ...]) -> None:
    assert trackers_of(arguments(report_to=given).report_to) == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", "must be of mlflow, tensorboard, wandb, or none. Did you mean 'tensorboard'"),
        (["wandb", "comet"], "report_to='comet' .*A tracker of your own is a callback"),
        ("wandb,none", "report_to='wandb,none' names trackers, and none"),
        (3, "report_to=3 must be str"),
    ],
)
def test_a_wrong_report_to_is_refused(arguments: Arguments, given: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(report_to=given)


def test_report_to_names_every_tracker_there_is() -> None:
    kinds = {kind.name: kind for kind in (MLflowCallback, TensorBoardCallback, WandbCallback)}
    assert tuple(sorted(kinds)) == TRACKERS
    assert all(name == kind.library for name, kind in kinds.items())


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_built(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not there
    rule = r"report_to='wandb' needs the library wandb, .*pip install 'trainer-core\[wandb\]'"
    with pytest.raises(ConfigurationError, match=rule):
        make_trainer(report_to="wandb")
    assert not (tmp_path / "run").exists()


def test_a_tracker_and_its_name_together_are_refused(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(TensorBoardCallback):
        library = "json"

        def __init__(self) -> None:
            super().__init__("mine")

    rule = "report_to='tensorboard' adds a TensorBoardCallback, and Mine is among the callbacks"
    for callback in (Mine, Mine()):
        with pytest.raises(ConfigurationError, match=rule):
            make_trainer(report_to=["tensorboard"], callbacks=[callback])
    make_trainer(report_to="none", callbacks=[Mine]).add_callback(LinesTracker())
