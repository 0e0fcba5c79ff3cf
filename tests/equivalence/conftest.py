"""Collects what the rows measured, and prints the table when all tests are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

# Modules of this folder import one another, and the processes that a row starts import them too.
sys.path.append(str(Path(__file__).parents[1]))

from equivalence.cases import CASES
from equivalence.table import Result, lines

ROW = "row of the table"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each row."""
    if "case" in metafunc.fixturenames:
        marks = {False: (), True: (pytest.mark.full,)}
        rows = [pytest.param(case, id=case.name, marks=marks[case.full]) for case in CASES]
        metafunc.parametrize("case", rows)


@pytest.fixture
def record_result(record_property: Callable[[str, object], None]) -> Callable[[Result], None]:
    """Puts a row into the table. It travels with the test's report, from whichever process ran it."""
    return lambda result: record_property(ROW, json.dumps(asdict(result)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = [value for report in reports for name, value in report.user_properties if name == ROW]
    if rows:
        terminalreporter.section("largest relative deviation from the reference over all steps")
        for line in lines(sorted((Result(**json.loads(row)) for row in rows), key=lambda row: row.name)):
            terminalreporter.write_line(line)
