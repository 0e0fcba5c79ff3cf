"""The figures of a run, worked out by hand beside those of the summary."""

import json
import math
from pathlib import Path
from statistics import quantiles

import pytest

from perf_metrics.commands.main import main
from perf_metrics.logs.summary import RunSummary, summarize_log, summary_json, summary_lines

GIB = 2**30
START = 1_790_000_000.0


def training(step: int, seconds_after_start: float, **figures: object) -> dict[str, object]:
    return {"global_step": step, "timestamp": START + seconds_after_start, "loss": 10.0 / step, **figures}


def write(tmp_path: Path, *entries: dict[str, object]) -> Path:
    path = tmp_path / "run" / "trainer_logs.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entries))
    return path


def test_every_figure_of_a_full_log(tmp_path: Path) -> None:
    speeds = [100.0, 400.0, 410.0, 390.0, 420.0]
    entries: list[dict[str, object]] = [
        training(
            10 * i,
            20.0 * i,
            tokens=100 * i,
            total_tokens=1000 * i,
            tok_per_sec=speed,
            mfu=speed / 1000,
            hfu=speed / 800,
            interval_seconds=20.0,
            data_wait_share=0.1 if i == 1 else 0.02,
            peak_mem_allocated=[i * GIB, (i + 1) * GIB],
        )
        for i, speed in enumerate(speeds, start=1)
    ]
    entries.insert(3, {"global_step": 30, "timestamp": START + 60, "eval_loss": 0.5})
    entries.append({"global_step": 50, "timestamp": START + 110, "eval_loss": 0.7, "eval_seconds": 10})
    summary = summarize_log(write(tmp_path, *entries).parent)
    p10, *_, p90 = quantiles(speeds, n=10, method="inclusive")
    assert summary == RunSummary(
        name="run",
        path=tmp_path / "run",
        steps=50,
        tokens=5000,
        final_loss=0.2,
        final_loss_mean=0.2,
        best_eval_loss=0.5,
        best_eval_step=30,
        tok_per_sec_median=400.0,
        tok_per_sec_p10=p10,
        tok_per_sec_p90=p90,
        mfu_median=0.4,
        hfu_median=0.5,
        peak_memory_bytes=6 * GIB,
        data_wait_share=pytest.approx((0.1 + 4 * 0.02) / 5),  # type: ignore[arg-type]
        wall_seconds=110.0,
        pauses=0,
        pause_seconds=0.0,
        resumes=None,
    )
    assert (p10, p90) == pytest.approx((216.0, 416.0))


def test_the_mean_of_the_last_tenth_is_weighted_by_tokens(tmp_path: Path) -> None:
    entries = [training(step, step, tokens=1000) for step in range(10, 191, 10)]
    entries += [training(195, 195, loss=1.0, tokens=300), training(200, 200, loss=2.0, tokens=100)]
    mean = (10 / 190 * 1000 + 1.0 * 300 + 2.0 * 100) / 1400
    assert summarize_log(write(tmp_path, *entries)).final_loss_mean == pytest.approx(mean)
    for entry in entries:
        del entry["tokens"]
    assert summarize_log(write(tmp_path, *entries)).final_loss_mean == pytest.approx(
        (10 / 190 + 1.0 + 2.0) / 3
    )


def test_a_pause_is_told_from_training_and_evaluation(tmp_path: Path) -> None:
    log = write(
        tmp_path,
        training(10, 100, interval_seconds=100.0),
        {"global_step": 10, "timestamp": START + 400, "eval_loss": 1.0, "eval_seconds": 300.0},
        training(20, 520, interval_seconds=100.0),  # 20 s for a checkpoint
        training(30, 4220, interval_seconds=100.0),  # an hour later
    )
    summary = summarize_log(log)
    assert (summary.pauses, summary.pause_seconds) == (1, pytest.approx(3600.0))
    assert summary.wall_seconds == pytest.approx(4220)
    assert summary.resumes is None


def test_steps_done_twice_count_once(tmp_path: Path) -> None:
    first = [training(step, step, total_tokens=10 * step) for step in (10, 20, 30)]
    second = [training(step, step + 500, total_tokens=10 * step, loss=7.0) for step in (20, 30)]
    summary = summarize_log(write(tmp_path, *first, *second))
    assert (summary.steps, summary.tokens, summary.final_loss, summary.resumes) == (30, 300, 7.0, 1)
    assert summary.wall_seconds == 520
    assert summary.pauses is None  # no interval_seconds


def test_a_clock_that_is_set_back_lengthens_no_run(tmp_path: Path) -> None:
    times = [20.0, 40.0, 60.0 - 3600.0, 80.0 - 3600.0]
    entries = [training(10 * i, t, interval_seconds=20.0) for i, t in enumerate(times, start=1)]
    assert summarize_log(write(tmp_path, *entries)).wall_seconds == 80.0


def test_what_a_log_does_not_tell_is_none_and_never_zero(tmp_path: Path) -> None:
    empty = summarize_log(write(tmp_path))
    figures = {**summary_json(empty)}
    assert figures.pop("name") == "run"
    assert figures.pop("path")
    assert set(figures.values()) == {None}
    row = summary_lines([empty])[1].split()
    assert set(row[1:]) == {"n/a"}


def test_a_loss_that_is_no_number_is_shown_as_such(tmp_path: Path) -> None:
    log = write(tmp_path, training(10, 10), training(20, 20, loss=None, mfu=None))
    summary = summarize_log(log)
    assert summary.final_loss is not None
    assert math.isnan(summary.final_loss)
    assert summary.mfu_median is None
    assert summary_lines([summary])[1].split()[3:5] == ["nan", "nan"]
    assert json.loads(json.dumps(summary_json(summary), allow_nan=False))["final_loss"] is None


def test_without_timestamps_the_final_entry_tells_the_time(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 5, "loss": 1.0}\n{"step": 5, "train_loss": 1.0, "train_runtime": 65.0}\n')
    assert summarize_log(log).wall_seconds == 65.0


def summary_with(**figures: object) -> RunSummary:
    fields = dict.fromkeys(RunSummary.__dataclass_fields__)
    return RunSummary(**{**fields, "name": "a", "path": Path("a"), **figures})  # type: ignore[arg-type]


def test_the_table_to_the_character() -> None:
    full = summary_with(
        name="wide", steps=2000, tokens=131_072_000, final_loss=2.04834, final_loss_mean=2.0232,
        best_eval_loss=2.0647, best_eval_step=1500, tok_per_sec_median=416_730.0, tok_per_sec_p10=405_840.0,
        tok_per_sec_p90=427_000.0, mfu_median=0.411, hfu_median=0.509, peak_memory_bytes=43 * GIB,
        data_wait_share=0.021, wall_seconds=4220.0, pauses=1, pause_seconds=3600.0, resumes=2,
    )  # fmt: skip
    assert "\n".join(summary_lines([summary_with(pauses=0), full])) == (
        "run   steps   tokens    loss  last 10%       best eval    tok/s      p10      p90    MFU    HFU"
        "  peak memory  data wait   wall      pauses  resumes\n"
        "a       n/a      n/a     n/a       n/a             n/a      n/a      n/a      n/a    n/a    n/a"
        "          n/a        n/a    n/a           0      n/a\n"
        "wide  2,000  131.07M  2.0483    2.0232  2.0647 @ 1,500  416.73K  405.84K  427.00K  41.1%  50.9%"
        "   43.000 GiB       2.1%  1h10m  1 of 1h00m        2"
    )
    assert summary_lines([]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (277.4, "4m37s"),
        (3599.6, "1h00m"),
        (90_000.0, "1d01h"),
    ],
)
def test_times_in_two_units(seconds: float, text: str) -> None:
    assert summary_lines([summary_with(wall_seconds=seconds)])[1].split()[-3] == text


@pytest.mark.parametrize(
    "odd",
    [
        {"loss": 10**400},
        {"loss": [[[1.0]]]},
        {"loss": [1.0, 10**400]},
        {"global_step": 10**400},
        {"global_step": float("inf")},
        {"timestamp": -1e308},
        {"interval_seconds": -5},
    ],
)
def test_numbers_without_measure_end_no_summary(tmp_path: Path, odd: dict[str, object]) -> None:
    usual = {"loss": 2.0, "tokens": 10, "total_tokens": 10, "interval_seconds": 1.0}
    entries = [{"global_step": step, "timestamp": 1e9 + step, **usual} for step in range(1, 4)]
    entries.insert(1, {"global_step": 1.5, "timestamp": 1e308, **usual, **odd})
    path = tmp_path / "trainer_logs.json"
    path.write_text(json.dumps(entries))
    summary = summarize_log(path)
    assert (summary.steps, summary.tokens, summary.final_loss) == (3, 10, 2.0)
    assert main(["summary", str(path)]) == 0
