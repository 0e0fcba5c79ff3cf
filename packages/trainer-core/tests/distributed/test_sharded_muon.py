"""Muon on parts of matrices, on real ranks: to the last bit what one process does with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_every_bit_is_that_of_one_process(launch: Callable[[str, int], Any], ranks: int) -> None:
    for seen in launch("sharded_muon.py", ranks):
        assert all(seen["moved"])
        assert all(seen["same"]), seen["same"]
        assert seen["sharded state"] == [True] * 6 + [False]
