"""Two ranks that run the same script again: all of them are told the same, and begin anew together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Notes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("again") / "run"


@pytest.fixture(scope="module")
def notes(launch: Callable[..., Any], folder: Path) -> Notes:
    job = launch("again.py", 2, str(folder), timeout=600)
    assert [process.code for process in job.processes] == [0, 0], job.told
    assert job.told.count("nothing left to train: step 7 of 7") == 2, job.told
    found: Notes = job.notes
    return found


def test_a_finished_run_keeps_curve_weights_and_metrics(notes: Notes) -> None:
    for rank in notes:
        assert len(rank["first"]["losses"]) == 7
        assert rank["again"]["session"] == rank["another"]["session"] == [7, 7]
        for name in ("again", "another"):
            assert {**rank[name], "session": [0, 7]} == rank["first"]


def test_all_ranks_begin_anew(notes: Notes, folder: Path) -> None:
    for rank in notes:
        assert rank["fresh"] == rank["another fresh"] == rank["first"] == notes[0]["first"]
    moved = [[path.name for path in place.iterdir()] for place in folder.glob("previous-*")]
    assert moved == [["checkpoint-7"]] * 2
    for rank in notes:
        assert "fresh of train()" in rank["unlike"]


def test_a_changed_rate_is_refused_or_holds_on_all_ranks(notes: Notes) -> None:
    for rank in notes:
        assert "allow_changes=('learning_rate',)" in rank["refused"]
        assert rank["changed"]["session"] == [7, 9]
        assert rank["changed"]["losses"][:7] == rank["first"]["losses"]
        # A straight line to 0 at the end, from the rate of the time.
        assert rank["rates"][6:] == pytest.approx([1e-2 / 7, 1e-3 * 2 / 9, 1e-3 / 9])
