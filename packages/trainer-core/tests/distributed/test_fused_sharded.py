"""The fused loss with a head that is spread over ranks, in real jobs of 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(("ranks", "cases"), [pytest.param(2, 6, marks=pytest.mark.full), (4, 7)])
def test_gradients_equal_those_of_one_process(
    launch: Callable[[str, int], list[dict[str, float]]], ranks: int, cases: int
) -> None:
    for rank, deviations in enumerate(launch("sharded_head.py", ranks)):
        assert len(deviations) == cases
        assert {case: value for case, value in deviations.items() if not value < 1e-6} == {}, rank
