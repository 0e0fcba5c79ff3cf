"""The command `perf-metrics fleet` as a user runs it."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from perf_metrics.commands.main import main

from .prometheus_server import PrometheusServer
from .synthetic_fleet import SyntheticFleet


@dataclass(frozen=True)
class ServedFleet:
    """A synthetic fleet, and the server that has its samples."""

    fleet: SyntheticFleet
    server: PrometheusServer

    def command(self, *options: str, url: str | None = None) -> list[str]:
        """Return the command that reports on all of it, without the MFU of the jobs.

        Args:
            *options: Further options.
            url: Of something in front of the server.
        """
        truth = self.fleet.truth
        times = ["--start", str(truth.start_s), "--end", str(truth.end_s)]
        return fleet_command("--prometheus", url or self.server.url, *times, *options)

    def with_mfu(self, *options: str, url: str | None = None) -> list[str]:
        """Return the same command with the file of MFU."""
        return self.command("--mfu", str(self.fleet.mfu_file), *options, url=url)


def fleet_command(*options: str) -> list[str]:
    """Return `perf-metrics fleet` with these options, for this Python."""
    return [sys.executable, "-m", "perf_metrics", "fleet", *options]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run(command: list[str]) -> Done:
    """Run a command to its end, in this process: of a process of its own, the imports take longest."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as error:
        code = main(command[command.index("fleet") :])
    return Done(code, out.getvalue(), error.getvalue())


def report_of(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a command that must succeed, and return the JSON that it writes into a folder."""
    path = folder / "report.json"
    done = run([*command, "--json", str(path)])
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report
