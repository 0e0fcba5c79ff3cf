"""Initial values on four real ranks: each gets what torch would have given it of a model with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ranks")

STRIDED = {
    "full sharding": [],
    "hybrid": [],
    "tensor": [],
    "tensor and rows": [0],
    "tensor and columns": [0, 1],
    "1 x 2 x 2": [0],
    "2 x 2 x 1": [],
}
"""The layouts, and the dimensions of parameters that two dimensions of the mesh shard in turn."""


@pytest.fixture(scope="module")
def ranks(launch: Callable[[str, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return launch("filling.py", 4)


@pytest.mark.parametrize("layout", STRIDED)
def test_every_shard_has_the_values_of_one_process(ranks: list[dict[str, Any]], layout: str) -> None:
    assert all(list(notes) == list(STRIDED) for notes in ranks)
    for notes in ranks:
        note = notes[layout]
        assert note["differ"] == [], "bit for bit what it would hold had the model had values"
        assert note["wrong"] == [], "gathered, the values of one process"
        assert len(note["filled"]) == 7
        assert set(note["strided"]) >= set(STRIDED[layout])
    assert any(notes[layout]["empty"] for notes in ranks), "a rank without rows is among the cases"
