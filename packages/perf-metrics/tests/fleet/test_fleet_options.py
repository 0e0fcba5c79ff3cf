"""What the command refuses before it reads, and what it leaves behind; on a server with a small fleet."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perf_metrics.commands.main import main

from .fleet_command import ServedFleet, fleet_command, run

pytestmark = pytest.mark.xdist_group("fleet")

FLEET = ["fleet", "--prometheus", "http://127.0.0.1:9"]
DAY = ["--start", "2026-01-01", "--end", "2026-01-02"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start", "20260101"], "start='20260101' is not in this century"),
        (["--start", "1767225600000"], "start='1767225600000' is not in this century"),
        (["--start", "99999999999999d"], "is not in this century"),
        (["--start", "yesterday"], "start='yesterday' must be ISO 8601"),
        ([*DAY, "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        ([*DAY, "--json", "/tmp"], "/tmp must be a file"),
        ([*DAY, "--json", "-"], "- must be a file"),
        ([*DAY, "--json", "{folder}/x", "--html", "{folder}/x"], "is given for both --json and --html"),
        ([*DAY, "--patience", "nan"], "patience_s=nan"),
        ([*DAY, "--tensor-mhz", "1830", "--tensor-mhz", "A=1000"], "one clock for all devices, or NAME=MHZ"),
        ([*DAY, "--outlier-points", "0"], "points=0.0 must be 0 to 100"),
    ],
)
def test_is_told_in_one_line_before_the_server_is_asked(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*FLEET, *(word.replace("{folder}", str(tmp_path)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_header_without_a_colon_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET, *DAY, "--header", "Authorization Bearer secret"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_the_files_are_written_though_nobody_reads_the_text(small_fleet: ServedFleet, tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    with subprocess.Popen(
        small_fleet.command("--json", str(path)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(120)
    assert len(json.loads(path.read_text())["jobs"]) == 60


def test_a_fleet_without_jobs_is_told_by_the_exit_status(small_fleet: ServedFleet) -> None:
    words = ["--start", "2025-01-01", "--end", "2025-01-02"]
    done = run(fleet_command("--prometheus", small_fleet.server.url, *words))
    assert done.returncode == 1
    assert "0 jobs on 0 devices" in done.stdout


def test_ctrl_c_ends_it_in_one_line() -> None:
    command = [sys.executable, "-m", "perf_metrics", *FLEET, *DAY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "gives no answer" in process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
