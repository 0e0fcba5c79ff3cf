"""Replicas sum what any of them has used, and leave the optimizer nothing of what none has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.xdist_group("ranks")
def test_only_what_no_replica_has_used_has_no_gradient(
    launch: Callable[[str, int], list[Any]],
) -> None:
    for first, second in launch("replicas.py", 2):
        unused = {"none": None, "frozen": None, "short": None}
        assert first == {"both": [3.0] * 3, "first": [5.0] * 3, "zeros": [0.0] * 3, **unused}
        # A parameter that an earlier step has used is like one that no step has.
        assert second == {"both": None, "first": [10.0] * 3, "zeros": [0.0] * 3, **unused}
