"""Two runs compared, and intervals in the summary of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from perf_metrics import mean_interval, shortest_window
from perf_metrics.commands.main import main
from perf_metrics.logs.compare import _in_one_unit, compare_logs, comparison_lines
from perf_metrics.logs.summary import read_run, steady_entries, summarize_log, summary_json, summary_lines

START = 1.7e9


def write(path: Path, mfu: float, *, entries: int = 120, seed: int = 0, ofu: float | None = 0.36) -> Path:
    """Write a log of one entry every 30 s, in which neighbours are alike and the first one warms up."""
    random, state, found = Random(seed), 0.0, []
    for number in range(1, entries + 1):
        state = 0.5 * state + random.gauss(0, 0.003)
        warm = 0.2 if number == 1 else 1.0
        entry = {
            "global_step": 10 * number,
            "timestamp": START + 30 * number,
            "loss": 2.0,
            "interval_seconds": 30.0,
            "mfu": warm * (mfu + state),
            "tok_per_sec": 100_000 * warm * (mfu + state),
        }
        if ofu is not None:
            entry["ofu"] = warm * (ofu + state + random.gauss(0, 0.0005))
        found.append(entry)
    path.write_text(json.dumps(found))
    return path


def test_the_summary_has_ofu_and_what_parts_it_from_mfu(tmp_path: Path) -> None:
    summary = summarize_log(write(tmp_path / "a.json", 0.40))
    assert summary.ofu is not None
    assert summary.mfu_minus_ofu is not None
    assert (summary.ofu.samples, summary.ofu.includes(0.36)) == (119, True)
    assert summary.mfu_minus_ofu.includes(0.04)
    # What moves both cancels out.
    assert summary.mfu_minus_ofu.half_width is not None
    assert summary.ofu.half_width is not None
    assert summary.mfu_minus_ofu.half_width < summary.ofu.half_width / 4
    row = summary_lines([summary])[1]
    assert summary.ofu.in_percent() in row
    assert summary.mfu_minus_ofu.in_points() in row
    told = json.loads(json.dumps(summary_json(summary), allow_nan=False))
    assert told["ofu"]["low"] < 0.36 < told["ofu"]["high"]
    assert told["mfu_minus_ofu"]["reason"] is None


def test_too_few_entries_are_said_below_the_table(tmp_path: Path) -> None:
    summary = summarize_log(write(tmp_path / "a.json", 0.40, entries=12))
    assert summary_lines([summary])[2:] == [
        "a: OFU has no interval, as 11 samples are too few for an interval, which takes 16"
    ]


def test_a_log_without_counters_has_the_table_of_before(tmp_path: Path) -> None:
    summary = summarize_log(write(tmp_path / "a.json", 0.40, ofu=None))
    assert (summary.ofu, summary.mfu_minus_ofu) == (None, None)
    assert "OFU" not in summary_lines([summary])[0]


def test_warm_up_is_the_first_entry_and_the_first_after_a_pause_or_a_resume(tmp_path: Path) -> None:
    def entry(step: int, seconds: float) -> dict[str, float]:
        return {
            "global_step": step,
            "timestamp": START + seconds,
            "loss": 1.0,
            "interval_seconds": 10.0,
            "mfu": 0.4,
        }

    log = tmp_path / "log.json"
    # A pause before 40; step 50 done twice.
    entries = [entry(step, second) for step, second in ((10, 10), (20, 20), (30, 30), (40, 900), (50, 910))]
    entries += [entry(50, 925), entry(60, 935)]
    log.write_text(json.dumps(entries))
    run = read_run(log)
    assert [one["global_step"] for one in steady_entries(run)] == [20, 30, 60]
    assert [one["global_step"] for one in steady_entries(run, after_step=20)] == [30, 60]


def test_the_better_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = write(tmp_path / "a.json", 0.40), write(tmp_path / "b.json", 0.42, seed=1)
    found = {one.key: one for one in compare_logs(*logs)}
    assert list(found) == ["tok_per_sec", "mfu", "ofu"]
    assert found["mfu"].higher == found["tok_per_sec"].higher == "B"
    assert found["mfu"].difference.includes(0.02)
    assert found["ofu"].higher is None
    assert main(["compare", *map(str, logs)]) == 0
    shown = capsys.readouterr().out
    assert "mfu: B is better." in shown
    assert "ofu: A and B cannot be told apart; " in shown
    assert "Runs of one setting differ as well" in shown
    assert [one.higher for one in compare_logs(*reversed(logs), keys=["mfu"])] == ["A"]


def test_how_long_to_measure_is_told_where_the_two_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [write(tmp_path / "a.json", 0.40), write(tmp_path / "b.json", 0.401, entries=60, seed=2)]
    (mfu,) = compare_logs(*logs, keys=["mfu"], difference=0.005)
    assert (mfu.higher, mfu.told_difference) == (None, pytest.approx(0.005 * mfu.first.mean))
    assert mfu.window_s is not None
    more = mfu.more_seconds
    assert more == (max(0.0, mfu.window_s - 119 * 30), max(0.0, mfu.window_s - 59 * 30))
    assert more[1] > 0
    assert " more of B would tell a difference of 0.2 points" in "\n".join(comparison_lines([mfu]))
    words = ["compare", *map(str, logs), "--keys", "mfu", "--difference", "0.5", "--json"]
    assert main(words) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["higher"], told["more_seconds"]) == (None, list(more))
    (wide,) = compare_logs(*logs, keys=["mfu"], difference=0.2)
    assert "a difference of 8 points would most likely have been seen" in "\n".join(comparison_lines([wide]))


def test_too_short_a_log_is_no_comparison(tmp_path: Path) -> None:
    logs = write(tmp_path / "a.json", 0.40), write(tmp_path / "b.json", 0.60, entries=12)
    (mfu,) = compare_logs(*logs, keys=["mfu"])
    assert (mfu.higher, mfu.window_s, mfu.more_seconds) == (None, None, None)
    assert (
        "mfu: cannot be compared; B: 11 samples are too few for an interval, which takes 16."
        in comparison_lines([mfu])
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--keys", "hfu"],
            "have no hfu after warm-up. Keys of both: global_step, interval_seconds, loss, mfu",
        ),
        (["--difference", "0"], "difference=0.0 must be a share between 0 and 1"),
        (["--skip-steps", "-1"], "skip_steps=-1 must be 0 or more"),
        (["--skip-steps", "100000"], "the logs have none of tok_per_sec, mfu, ofu in common"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    logs = write(tmp_path / "a.json", 0.40), write(tmp_path / "b.json", 0.42)
    assert main(["compare", *map(str, logs), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("mean", "half", "told"),
    [
        (1003.7, 2.31, "1.0037K (± 0.0023K)"),
        (2.0, 0.00456, "2.0000 (± 0.0046)"),
        (-3.6e-6, 1.2e-6, "-3.6e-06 (± 1.2e-06)"),
        (41_200.0, 150.0, "41.20K (± 0.15K)"),
        (7.43, 5.42, "7.4 (± 5.4)"),
        (5.0, 0.0, "5.00 (± 0)"),
    ],
)
def test_an_interval_is_shown_to_its_second_digit(mean: float, half: float, told: str) -> None:
    around = mean_interval([0.0, 1.0] * 20)
    shown = replace(around, mean=mean, half_width=half)
    assert _in_one_unit(shown) == told


def test_a_difference_that_nobody_can_wait_for_has_no_window(tmp_path: Path) -> None:
    one = mean_interval([1.0, 1.1, 0.9, 1.05] * 10, step_s=30)
    assert shortest_window(1e-300, one) is None
    assert shortest_window(1e-10, one) is None
