"""Columns over figures that each rank has of its own, and figures that are missing."""

import io

import pytest

from perf_metrics import ProgressCallback
from perf_metrics.display import ColumnOverrides

RANKS = {"peak_mem_allocated": [2.0e9, 2.2e9], "peak_mem": [2.0e9, 2.2e9]}
BARE: ColumnOverrides = {"step": None, "epoch": None}


def shown(run, columns: ColumnOverrides, *records: dict[str, object], **settings: int) -> list[str]:
    stream = io.StringIO()
    callback = ProgressCallback(False, stream, {**BARE, **columns}, **settings)
    for record in records:
        run.state.global_step += 10
        run.fire("on_log", callback, logs=record)
    return stream.getvalue().splitlines()


def test_the_figure_of_each_rank(run) -> None:
    assert shown(run, {"peak_mem": {"width": 32, "reduce": "all"}}, RANKS) == [
        "                        peak_mem",
        "             1.863 GiB/2.049 GiB",
    ]


def test_two_columns_of_one_key(run) -> None:
    columns: ColumnOverrides = {
        "peak_mem": None,
        "min": {"key": "peak_mem_allocated", "label": "min_mem", "width": 11, "fmt": "gib", "reduce": "min"},
        "max": {"key": "peak_mem_allocated", "label": "max_mem", "width": 11, "fmt": "gib", "reduce": "max"},
    }
    assert shown(run, columns, RANKS) == [
        "    min_mem     max_mem",
        "  1.863 GiB   2.049 GiB",
    ]


def test_the_spread_between_ranks(run) -> None:
    columns: ColumnOverrides = {
        "peak_mem": {
            "label": "spread",
            "reduce": lambda figures: max(figures) - min(figures),
        }
    }
    assert shown(run, columns, RANKS) == ["     spread", "  0.186 GiB"]
    assert shown(run, columns, {"peak_mem": 2.0e9}) == ["     spread", "  0.000 GiB"]


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"loss": float("nan"), "mfu": None}, "       nan peak unknown"),
        ({"loss": float("inf"), "mfu": 0.5}, "       inf   50.0%"),
        ({"loss": None, "mfu": 0.5}, "       n/a   50.0%"),
    ],
)
def test_what_is_no_number_and_what_is_not_there(run, record: dict[str, object], row: str) -> None:
    header, line = shown(run, {}, record)
    assert (header.split(), line) == (["loss", "mfu"], row)


def test_a_rank_without_a_figure(run) -> None:
    record = {"peak_mem": [None, 2.0e9]}
    assert shown(run, {}, record) == ["   peak_mem", "  1.863 GiB"]
    assert shown(run, {"peak_mem": {"reduce": "all"}}, record)[1] == "n/a/1.863 GiB"


def test_utilization_of_the_hardware_when_asked_for(run) -> None:
    record = {"mfu": 0.4, "hfu": 0.5}
    assert shown(run, {}, record) == ["    mfu", "  40.0%"]
    assert shown(run, {"hfu": {"width": 7, "fmt": ".1%"}}, record) == ["    mfu     hfu", "  40.0%   50.0%"]


def test_a_header_before_each_row(run) -> None:
    out = shown(run, {}, {"loss": 1.0}, {"loss": 2.0}, header_interval=1)
    assert out == ["      loss", "   1.00000", "      loss", "   2.00000"]


def test_the_runtime_so_far_is_no_summary(run) -> None:
    """transformers.Trainer has it in the records of intervals when it counts tokens."""
    out = shown(run, {}, {"loss": 1.0, "train_runtime": 2.0}, {"train_runtime": 3.0})
    assert out == ["      loss", "   1.00000", "this session", "  runtime (s)  3.0"]
