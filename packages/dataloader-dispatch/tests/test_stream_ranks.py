"""Real ranks over gloo: four of them stop in the middle of an epoch, and two continue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_two_ranks_finish_the_epoch_that_four_began(launch: Callable[..., Any], tmp_path: Path) -> None:
    four = launch("stream_ranks.py", 4, 7)
    assert [rank.code for rank in four] == [0] * 4, four[0].err
    states = tmp_path / "states.json"
    states.write_text(json.dumps([rank.note["state"] for rank in four]))
    two = launch("stream_ranks.py", 2, 10_000, states)
    assert [rank.code for rank in two] == [0] * 2, two[0].err
    seen = Counter(token for rank in [*four, *two] for token in rank.note["tokens"])
    assert seen == Counter({number + 1: 1 + number % 5 for number in range(997)})
    assert [rank.note["steps"] for rank in four] == [7] * 4
    assert two[0].note["steps"] == two[1].note["steps"] > 7
    assert [rank.note["epoch"] for rank in two] == [1, 1]


def test_epoch_changes_between_ranks_that_read_and_one_that_reads_for_all(
    launch: Callable[..., Any],
) -> None:
    ranks = launch("stream_handover.py", 4)
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * 4, ranks[0].err
    notes = [rank.note for rank in ranks]
    seen = Counter(token for note in notes for tokens in note["tokens"] for token in tokens)
    assert seen == Counter({number + 1: 1 + number % 5 for number in range(997)})
    assert [len(note["tokens"]) for note in notes] == [4, 4, 2, 2]
    assert all(tokens for note in notes for tokens in note["tokens"])
    assert [note["epochs"] for note in notes] == [[0, 0, 0, 1]] * 2 + [[0, 0]] * 2
    assert [note["divisible"] for note in notes] == [False] * 4
