import io
import os
import pty
import subprocess
import sys
import termios

import pytest

from perf_metrics import ColumnSpec, ProgressCallback

RECORD = {
    "loss": 2.345672,
    "learning_rate": 1e-4,
    "grad_norm": 0.8731,
    "epoch": 0.25,
    "tok_per_sec": 41_200.0,
    "mfu": 0.42,
    "peak_mem": [2.0e9, 2.2e9],
    "total_tokens": 5,
}


def lines(run, callback: ProgressCallback, stream: io.StringIO, *records: dict[str, object]) -> list[str]:
    run.fire("on_train_begin", callback)
    for record in records:
        run.state.global_step += 10
        run.state.epoch = 0.25
        run.fire("on_log", callback, logs=record)
    return stream.getvalue().splitlines()


def test_the_example_of_the_specification_to_the_character(run) -> None:
    stream = io.StringIO()
    widths = {"learning_rate": {"width": 14}, "mfu": {"width": 6}}
    callback = ProgressCallback(use_tqdm=False, output_stream=stream, step_columns=widths)
    run.state.max_steps, run.state.global_step = 0, 990
    assert lines(run, callback, stream, RECORD) == [
        "  step  epoch       loss  learning_rate  grad_norm  tok_per_sec    mfu    peak_mem",
        "  1000   0.25    2.34567       1.00e-04      0.873       41.20K  42.0%   2.049 GiB",
    ]


def test_by_default_the_step_stands_before_the_last_one(run) -> None:
    stream = io.StringIO()
    assert lines(run, ProgressCallback(False, stream), stream, RECORD) == [
        "   step  epoch       loss learning_rate  grad_norm  tok_per_sec     mfu    peak_mem",
        " 10/100   0.25    2.34567      1.00e-04      0.873       41.20K   42.0%   2.049 GiB",
    ]


def test_only_columns_in_the_record_and_none_as_what_is_missing(run) -> None:
    stream = io.StringIO()
    first, second = {"loss": 3.0, "mfu": None}, {"loss": 2.0, "mfu": None, "grad_norm": None}
    assert lines(run, ProgressCallback(False, stream), stream, first, second, second) == [
        "   step  epoch       loss          mfu",
        " 10/100   0.25    3.00000 peak unknown",
        "   step  epoch       loss  grad_norm          mfu",
        " 20/100   0.25    2.00000        n/a peak unknown",
        " 30/100   0.25    2.00000        n/a peak unknown",
    ]


def test_text_is_never_cut_and_stays_aligned(run) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(False, stream, {"epoch": None, "loss": {"width": 4}})
    assert lines(run, callback, stream, {"loss": 1.0}, {"loss": 12345.0}, {"loss": 1.0}) == [
        "   step    loss",
        " 10/100 1.00000",
        "   step        loss",
        " 20/100 12345.00000",
        " 30/100     1.00000",
    ]


def test_the_header_comes_again(run) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(False, stream, header_interval=3)
    out = lines(run, callback, stream, *({"loss": 1.0} for _ in range(7)))
    assert [number for number, line in enumerate(out) if "loss" in line] == [0, 4, 8]


def test_columns_are_merged_deleted_and_appended(run) -> None:
    stream = io.StringIO()
    columns = {
        "peak_mem": None,
        "epoch": None,
        "learning_rate": None,
        "grad_norm": None,
        "tok_per_sec": {"fmt": ",d", "label": "tok/s"},
        "mfu": ColumnSpec(fmt=".0%", width=5),
        "min_mem": {"key": "peak_mem", "fmt": "gib", "reduce": "min"},
        "max_mem": {"key": "peak_mem", "fmt": "gib", "label": "most"},
        "total_tokens": {},
    }
    assert lines(run, ProgressCallback(False, stream, columns), stream, RECORD) == [
        "   step       loss        tok/s   mfu   peak_mem       most total_tokens",
        " 10/100    2.34567       41,200   42%  1.863 GiB  2.049 GiB            5",
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss": {"wdith": 3}}, "column 'loss' has no field 'wdith'. Did you mean 'width'"),
        (
            {"grad_nrm": None},
            "column 'grad_nrm' is None, but no such column exists. Did you mean 'grad_norm'",
        ),
        ({"loss": {"width": 0}}, "column 'loss': width=0 must be a positive number"),
        ({"loss": {"fmt": ".3q"}}, "column 'loss': fmt='.3q'"),
        ({"loss": {"reduce": "median"}}, "column 'loss': reduce='median'"),
    ],
)
def test_bad_columns(columns: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProgressCallback(step_columns=columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"header_interval=0"):
        ProgressCallback(header_interval=0)
    with pytest.raises(ValueError, match=r"output_stream='file'"):
        ProgressCallback(output_stream="file")  # type: ignore[arg-type]


def test_evaluations_are_lines_of_their_own_printed_once(run) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(False, stream)
    metrics = {"eval_loss": 1.9876543, "eval_tokens": 131072, "eval_seconds": 4.2134, "epoch": 0.5}
    lines(run, callback, stream, {"loss": 2.0})
    run.fire("on_log", callback, logs=metrics)
    run.fire("on_evaluate", callback, metrics=metrics)
    assert stream.getvalue().splitlines()[2:] == [
        " 10/100  eval  loss 1.98765  tokens 131,072  seconds 4.213"
    ]


def test_the_closing_summary(run) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(
        False, stream, final_metrics={"epoch": None, "best": {"key": "best_loss", "fmt": ".2f"}}
    )
    final = {"train_runtime": 1234.56, "total_tokens": 8_192_000, "epoch": 2.0, "best_loss": 1.5, "step": 9}
    assert lines(run, callback, stream, final) == [
        "this session",
        "  runtime (s)   1,234.6",
        "  total tokens    8.19M",
        "  best_loss        1.50",
    ]


def test_only_world_rank_zero_prints(run, capsys: pytest.CaptureFixture[str]) -> None:
    run.state.is_world_process_zero = False
    callback = ProgressCallback(use_tqdm=True)
    run.fire("on_train_begin", callback)
    run.fire("on_step_end", callback)
    run.fire("on_log", callback, logs=RECORD)
    run.fire("on_evaluate", callback, metrics={"eval_loss": 1.0})
    run.fire("on_log", callback, logs={"train_runtime": 1.0})
    run.fire("on_train_end", callback)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_standard_streams_by_name(run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run.fire("on_log", ProgressCallback(False, name), logs={"loss": 1.0})
    captured = capsys.readouterr()
    assert "1.00000" in getattr(captured, name[3:])
    assert getattr(captured, "err" if name == "stdout" else "out") == ""


def test_the_bar_goes_to_stderr_and_the_table_above_it(run, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ProgressCallback(use_tqdm=True)
    run.state.max_steps, run.state.global_step = 6, 3
    run.fire("on_train_begin", callback)
    for step in (4, 5, 6):
        run.state.global_step = step
        run.fire("on_step_end", callback)
        run.fire("on_log", callback, logs={"loss": float(step)})
    run.fire("on_log", callback, logs={"train_runtime": 1.0})
    run.fire("on_train_end", callback)
    out, err = capsys.readouterr()
    table = [line.rstrip() for line in out.replace("\r", "\n").splitlines() if line.strip()]
    assert table == [
        "  step  epoch       loss",
        "   4/6   0.00    4.00000",
        "   5/6   0.00    5.00000",
        "   6/6   0.00    6.00000",
        "this session",
        "  runtime (s)  1.0",
    ]
    assert "3/6" in err
    assert "6/6" in err


TERMINAL_SCRIPT = """
from types import SimpleNamespace
from perf_metrics import ProgressCallback
state = SimpleNamespace(global_step=0, max_steps=2, epoch=0.0, is_world_process_zero=True)
callback = ProgressCallback()
callback.on_train_begin(None, state, None)
state.global_step = 2
callback.on_step_end(None, state, None)
callback.on_log(None, state, None, logs={"loss": 1.0})
callback.on_train_end(None, state, None)
"""


def test_a_bar_appears_by_itself_only_on_a_terminal() -> None:
    command = [sys.executable, "-c", TERMINAL_SCRIPT]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    assert len(piped.stdout.splitlines()) == 2
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    with os.fdopen(leader, "rb", buffering=0) as terminal:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=follower, check=True)
        os.close(follower)
        assert b"2/2" in terminal.read(4096)
