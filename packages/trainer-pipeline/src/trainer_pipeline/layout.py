"""Which rank has which stage, and which stage has which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Layout(NamedTuple):
    """Stages on the ranks of a pipeline."""

    ranks: int
    stages_per_rank: int
    style: str
    """loop: rank r has the stages r, r + ranks, r + 2 ranks, ...; v: rank r has r and the r-th from the end,
    so that first and last stage meet on rank 0."""

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        if self.style == "v":
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage."""
        return self.rank_of(self.num_stages - 1)


def balanced(costs: Sequence[float], parts: int, *, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Cut a row into consecutive parts so that the most expensive one costs as little as possible.

    Of several such cuts it is the one with the smallest sum of squares, so that the others are even too.

    Args:
        costs: What each item of the row costs; at least as many as parts.
        parts: How many parts, each of at least one item.
        before: What the first part costs besides.
        after: What the last part costs besides.

    Returns:
        The items of each part.
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[i]: (largest, sum of squares, cuts) of the first i items in as many parts as rounds so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for part in range(parts):
        extra = (before if part == 0 else 0.0) + (after if part == parts - 1 else 0.0)
        ends = range(part + 1, count - (parts - 1 - part) + 1)
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, (*cuts, end))
                for start, (largest, squares, cuts) in best.items()
                if start < end
                for cost in (sums[end] - sums[start] + extra,)
            )
            for end in ends
        }
    cuts = best[count][2]
    return [range(start, end) for start, end in zip((0, *cuts), cuts, strict=False)]
