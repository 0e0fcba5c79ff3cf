"""Which rank has which stage, and which stage has which blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from trainer_pipeline.schedules import StageLayout
from trainer_pipeline.splitting import balanced

KINDS = [(ranks, stages, "loop") for ranks in (1, 2, 3, 4, 8) for stages in (1, 2, 3)] + [
    (ranks, 2, "v") for ranks in (1, 2, 3, 4, 8)
]


@pytest.mark.parametrize(("ranks", "stages", "style"), KINDS)
def test_each_stage_is_on_one_rank(ranks: int, stages: int, style: str) -> None:
    layout = StageLayout(ranks, stages, style)
    found = [layout.stages_of(rank) for rank in range(ranks)]
    assert layout.num_stages == ranks * stages
    assert sorted(stage for each in found for stage in each) == list(range(ranks * stages))
    for rank, each in enumerate(found):
        assert len(each) == stages
        assert list(each) == sorted(each)
        assert {layout.rank_of(stage) for stage in each} == {rank}


def test_loop() -> None:
    layout = StageLayout(4, 2, "loop")
    assert [layout.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.last_rank == 3


def test_v() -> None:
    layout = StageLayout(4, 2, "v")
    assert [layout.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert layout.last_rank == 0


def cuts(count: int, parts: int) -> Iterator[list[range]]:
    """Every way to cut a row."""
    for places in combinations(range(1, count), parts - 1):
        yield [range(start, end) for start, end in zip((0, *places), (*places, count), strict=True)]


def price(costs: list[float], parts: list[range], before: float, after: float) -> tuple[float, float]:
    """The most expensive part, and the sum of squares."""
    sums = [sum(costs[place] for place in part) for part in parts]
    sums[0] += before
    sums[-1] += after
    return max(sums), sum(value * value for value in sums)


@pytest.mark.parametrize("seed", range(60))
def test_balanced_is_the_best_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    parts = draw.randint(1, count)
    costs = [float(draw.choice((1, 1, 1, 2, 5, draw.randint(0, 9)))) for _ in range(count)]
    before, after = float(draw.randint(0, 6)), float(draw.randint(0, 12))
    found = balanced(costs, parts, before=before, after=after)
    assert len(found) == parts
    assert all(len(part) for part in found)
    assert [place for part in found for place in part] == list(range(count))
    largest, squares = price(costs, found, before, after)
    prices = [price(costs, each, before, after) for each in cuts(count, parts)]
    assert largest == min(most for most, _ in prices)
    assert squares == min(square for most, square in prices if most == largest)


def test_equal_layers_are_divided_equally() -> None:
    assert [len(part) for part in balanced([1.0] * 12, 4)] == [3, 3, 3, 3]
    assert sorted(len(part) for part in balanced([1.0] * 14, 4)) == [3, 3, 4, 4]


def test_a_head_takes_layers_from_the_last_part() -> None:
    assert [len(part) for part in balanced([1.0] * 13, 4, before=1.0, after=2.0)] == [3, 4, 4, 2]


def test_many_layers_are_divided_at_once() -> None:
    parts = balanced([1.0 + place % 3 for place in range(200)], 16, before=2.0, after=9.0)
    assert len(parts) == 16
    assert parts[-1].stop == 200
