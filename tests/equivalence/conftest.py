"""Collects what the rows measured, and prints the table when all tests are done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Modules of this folder import one another, and the processes that a row starts import them too.
sys.path.append(str(Path(__file__).parents[1]))

from equivalence.table import Result, lines

_RESULTS = pytest.StashKey[list[Result]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []


@pytest.fixture
def record_result(pytestconfig: pytest.Config) -> Callable[[Result], None]:
    """Puts a row into the table."""
    return pytestconfig.stash[_RESULTS].append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if results := config.stash[_RESULTS]:
        terminalreporter.section("largest relative deviation from the reference over all steps")
        for line in lines(results):
            terminalreporter.write_line(line)
