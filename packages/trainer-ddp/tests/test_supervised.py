"""Classifiers and regressors on several ranks, with batches that do not come out even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_curve_is_that_of_a_plain_loop(launch: Callable[..., Any], ranks: int) -> None:
    job = launch("supervised.py", ranks, timeout=240)
    assert [process.code for process in job.processes] == [0] * ranks, job.told
    for notes in job.notes:
        assert len(notes) == 12
        for name, (found, expected) in notes.items():
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name
