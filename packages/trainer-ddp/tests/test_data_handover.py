"""A run continues with its data in mid-epoch, whoever reads them: each rank its shards, or one for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

DOCUMENTS = Counter({number + 1: 2 + number % 4 for number in range(150)})
CHAINS = ("own, alone, own", "dispatched, own, dispatched")


@pytest.fixture(scope="module")
def notes(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    job = launch("handover.py", 2, str(tmp_path_factory.mktemp("runs")), timeout=240)
    assert [process.code for process in job.processes] == [0, 0], job.told
    found: list[dict[str, Any]] = job.notes
    return found


@pytest.mark.parametrize("name", ["alone", *CHAINS])
def test_every_document_comes_exactly_once(notes: list[dict[str, Any]], name: str) -> None:
    sessions = [tokens for each in notes for tokens in each[name]["tokens"]]
    assert all(sessions)
    assert sum(map(Counter, sessions), Counter()) == DOCUMENTS


@pytest.mark.parametrize("name", CHAINS)
def test_sessions_begin_where_the_one_before_stopped(notes: list[dict[str, Any]], name: str) -> None:
    assert notes[0][name]["began"] == [0, 5, 10]
    assert [len(each[name]["tokens"]) for each in notes] == [3, 2 if "alone" in name else 3]


@pytest.mark.parametrize("name", CHAINS)
def test_losses_are_those_of_the_run_that_was_left_alone(notes: list[dict[str, Any]], name: str) -> None:
    whole, chain = notes[0]["alone"]["losses"], notes[0][name]["losses"]
    # Up to the end of the first shard, any number of ranks has the same rows in a step.
    assert len(whole) > 20
    assert chain[:18] == pytest.approx(whole[:18], rel=1e-5)
    assert max(chain) < 6  # of a vocabulary of 151, whose even guess is 5


@pytest.mark.parametrize("name", CHAINS)
def test_padding_for_a_rank_without_data_is_no_input(notes: list[dict[str, Any]], name: str) -> None:
    assert notes[0][name]["positions"] == notes[0]["alone"]["positions"] > 0
