"""Tests under the fake device fail where it is missing, and where a race was seen."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Never skipped: tests that did not run would look like tests that passed.
if os.environ.get("FAKECUDA") != "1" or not torch.cuda.is_available():
    raise RuntimeError(
        "These tests need the fake device. Run `uv run nox -s device`, which compiles it and sets FAKECUDA=1."
    )


def pytest_report_header() -> str:
    """Say what these tests ran on."""
    return f"fake device: {torch.cuda.device_count()} devices in host memory"


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tell what notes executed lines which test they belong to."""
    import fakecuda

    if fakecuda.collector is not None:
        fakecuda.collector.test = nodeid


def pytest_unconfigure() -> None:
    """Write which lines were executed, if that is noted."""
    import fakecuda

    if fakecuda.collector is not None:
        fakecuda.collector.write()


@pytest.fixture(autouse=True)
def no_race() -> Iterator[None]:
    """Hold every test to streams that wait for one another where they share memory."""
    import fakecuda

    fakecuda.races.clear()
    torch.cuda.set_device(0)
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    assert not fakecuda.races
