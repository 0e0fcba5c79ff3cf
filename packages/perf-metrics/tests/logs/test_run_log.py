"""A log as one run: what a resume has made void, series, tokens and names."""

import json
import math
from pathlib import Path

import pytest

from perf_metrics.logs.plot import percent_text, smooth_values, tick_text
from perf_metrics.logs.summary import RunLog, default_names, read_run


def run_of(tmp_path: Path, *entries: dict[str, object]) -> RunLog:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return read_run(path)


def test_entries_from_where_training_came_back_to_are_void(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"step": 10, "loss": 5.0},
        {"step": 20, "loss": 4.0},
        {"step": 20, "eval_loss": 4.5},
        {"step": 40, "loss": 9.0},
        {"step": 40, "eval_loss": 9.5},
        {"step": 20, "eval_loss": 4.4},  # the resumed run makes up for an evaluation
        {"step": 30, "loss": 3.0},
        {"step": 50, "loss": 2.0},
    )
    losses, evaluations = run.series("loss"), run.series("eval_loss")
    assert (losses.steps, losses.values) == ((10, 20, 30, 50), (5.0, 4.0, 3.0, 2.0))
    assert (evaluations.steps, evaluations.values) == ((20,), (4.4,))
    assert run.resumes_seen == 1
    assert len(run.written) == 8


def test_the_same_step_again_is_a_resume_and_an_evaluation_of_an_old_step_is_none(tmp_path: Path) -> None:
    again = run_of(tmp_path, {"step": 10, "loss": 5.0}, {"step": 10, "loss": 4.0})
    assert (again.series("loss").values, again.resumes_seen) == ((4.0,), 1)
    late = run_of(
        tmp_path, {"step": 10, "loss": 5.0}, {"step": 20, "loss": 4.0}, {"step": 10, "eval_loss": 6}
    )
    assert (late.series("loss").values, late.resumes_seen) == ((5.0, 4.0), 0)


def test_series_of_lists_nulls_and_words(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"step": 1, "memory": [1, 3], "loss": None, "note": "text"},
        {"step": 2, "memory": [None, 2], "loss": 1.0, "note": True},
        {"step": 3, "memory": []},
        {"loss": 7.0},
        {"step": "4", "loss": 7.0},
    )
    highest = run.series("memory")
    assert highest.steps == (1, 2, 3)
    assert highest.values[:2] == (3.0, 2.0)
    assert math.isnan(highest.values[2])
    assert run.series("memory", min).values[0] == 1.0
    assert run.series("loss").finite() == [1.0]
    assert not run.series("note")
    assert not run.series("nothing")


def test_tokens_between_and_beyond_what_is_logged(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"step": 10, "loss": 5.0, "total_tokens": 1000},
        {"step": 20, "loss": 4.0, "total_tokens": 3000},
        {"step": 25, "eval_loss": 4.0},
    )
    assert [run.tokens_at(step) for step in (0, 5, 10, 15, 20)] == [0, 500, 1000, 2000, 3000]
    assert math.isnan(run.tokens_at(25))
    theirs = run_of(tmp_path, {"step": 4, "loss": 5.0, "num_input_tokens_seen": 80})
    assert theirs.has_tokens
    assert theirs.tokens_at(2) == 40
    assert not run_of(tmp_path, {"step": 4, "loss": 5.0}).has_tokens


def test_the_final_entry_speaks_of_the_whole_run(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"step": 10, "loss": 5.0, "mfu": 0.4, "total_tokens": 1000, "train_runtime": 5.0},
        {"step": 12, "mfu": 0.3, "total_tokens": 1200, "train_runtime": 9.0},
    )
    assert run.series("mfu").values == (0.4,)
    assert run.tokens_at(12) == 1200


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    a, b = tmp_path / "a" / "run", tmp_path / "b" / "run"
    for directory in (a, b):
        directory.mkdir(parents=True)
        (directory / "trainer_logs.json").write_text("[]")
    (a / "more.jsonl").write_text("")
    assert default_names([a]) == ["run"]
    assert default_names([a, a / "more.jsonl"]) == ["run", "more"]
    assert default_names([a / "trainer_logs.json", b]) == ["a/run", "b/run"]
    assert default_names([a, a / "trainer_logs.json"]) == ["run", "run"]
    assert default_names([a / "x.json", a / "x.jsonl"]) == [str(a / "x.json"), str(a / "x.jsonl")]
    assert default_names([]) == []


def test_smoothing_is_the_weighted_mean_of_what_came_before() -> None:
    assert smooth_values([1.0, 2.0, 4.0], 0.0) == [1.0, 2.0, 4.0]
    weights = [0.25, 0.5, 1.0]
    expected = sum(w * v for w, v in zip(weights, [1.0, 2.0, 4.0], strict=True)) / sum(weights)
    assert smooth_values([1.0, 2.0, 4.0], 0.5)[-1] == pytest.approx(expected)
    with_gap = smooth_values([1.0, math.nan, 2.0, 4.0], 0.5)
    assert math.isnan(with_gap[1])
    assert with_gap[-1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (2.5, "2.5"), (-3, "-3"), (0.3000000000000001, "0.3"), (0.02, "0.02"), (5e-4, "5e-4"),
        (1.5e-3, "1.5e-3"), (-1e-5, "-1e-5"), (999, "999"), (2500, "2.5K"), (1.2e7, "12M"), (3e9, "3G"),
    ],
)  # fmt: skip
def test_numbers_on_an_axis_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text


def test_shares_on_an_axis() -> None:
    assert [percent_text(share) for share in (0.0, 0.4, 0.005, 1.2)] == ["0%", "40%", "0.5%", "120%"]
