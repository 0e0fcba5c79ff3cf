"""The console script: output for people and for programs, and one line for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf_metrics import JsonLogger
from perf_metrics.commands.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def log(run) -> Path:
    """A log written by the logger itself."""
    logger = JsonLogger()
    run.fire("on_train_begin", logger)
    for step in (10, 20, 30):
        run.state.global_step = step
        run.fire(
            "on_log", logger, logs={"loss": 30.0 / step, "tok_per_sec": 1000.0, "total_tokens": 64 * step}
        )
    return Path(run.args.logging_dir)


def test_plot_writes_a_picture_and_says_where(log: Path, tmp_path: Path, capsys: Captured) -> None:
    output = tmp_path / "pictures" / "runs.svg"
    options = ["--panels", "loss, tok_per_sec", "--x", "tokens", "--smooth", "0.5"]
    names = ["--labels", "one,two", "--title", "Twice the same"]
    assert main(["plot", str(log), str(log), "-o", str(output), *options, *names]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    picture = output.read_text()
    for text in ("one", "two", "Twice the same", "tokens", "tokens/s", "training loss as logged"):
        assert f"<!-- {text} -->" in picture


def test_plot_has_a_name_for_the_picture(
    log: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(log)]) == 0
    assert capsys.readouterr().out == "training-curves.png\n"
    assert (tmp_path / "training-curves.png").read_bytes().startswith(b"\x89PNG")


def test_summary_as_table_and_as_json(log: Path, tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"step": 5, "loss": 2.5}\n')
    assert main(["summary", str(log), str(other)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "steps", "tokens", "loss"]
    assert [row.split()[:4] for row in rows] == [
        ["logs", "30", "1.92K", "1.0000"],
        ["other", "5", "n/a", "2.5000"],
    ]
    assert main(["summary", str(log), str(other), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["final_loss"], first["tok_per_sec_median"]) == ("logs", 1.0, 1000.0)
    assert second["tokens"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plot", "{log}", "--panels", "los"],
            "perf-metrics: panels has 'los', which is neither .* Did you mean 'loss'",
        ),
        (["plot", "{log}", "--panels", "mfu"], "perf-metrics: nothing to plot in panel 'mfu'"),
        (["plot", "{log}", "-o", "a.jpg"], "perf-metrics: output='a.jpg' must end in"),
        (["plot", "{log}", "--labels", "a,b"], "perf-metrics: labels has 2 names for 1 log files"),
        (["plot", "nowhere"], "perf-metrics: .*No such file or directory: 'nowhere'"),
        (["summary", "{log}/.."], "perf-metrics: .* has no trainer_logs.json"),
        (["summary", "{log}", __file__], "perf-metrics: .*test_main.py is not a log file"),
    ],
)
def test_bad_input_is_one_line(log: Path, capsys: Captured, words: list[str], message: str) -> None:
    import re

    assert main([word.format(log=log) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(message, captured.err)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["plod", "a"],
        ["plot"],
        ["plot", "a", "--x", "epoch"],
        ["plot", "a", "--smooth", "much"],
        ["summary"],
    ],
)
def test_bad_usage_is_one_line(words: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("perf-metrics")
    assert message.endswith(". See --help.\n")
    assert message.count("\n") == 1


def test_a_missing_library_is_one_line(
    log: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(log), "-o", str(tmp_path / "a.png")]) == 1
    assert "pip install 'perf-metrics[plot]'" in capsys.readouterr().err


def test_the_module_is_the_script_and_ends_quietly_when_nobody_reads(log: Path) -> None:
    command = [sys.executable, "-m", "perf_metrics", "summary", *[str(log)] * 700]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("run ")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0
