"""The rows of several processes: a wrong one is seen, and a lost rank is the failure of its row alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from equivalence.case import EXACT, SHORT, Case
from equivalence.data import RaggedLoader, Shard
from equivalence.mistakes import leave, mean_of_means
from equivalence.table import measure


def test_comparison_sees_a_mean_of_the_means_of_ranks(tmp_path: Path) -> None:
    case = Case(name="mean", options=mean_of_means, runner="ranks", world_size=2, accumulation=2)
    assert measure(case, tmp_path).loss > 1000 * EXACT


def test_lost_rank_fails_its_row_and_not_the_next(tmp_path: Path) -> None:
    lost = Case(name="lost", options=leave, runner="ranks", recipe=SHORT, world_size=2, accumulation=2)
    with pytest.raises(RuntimeError, match="lost: not every rank trained it") as caught:
        measure(lost, tmp_path / "lost")
    assert "rank 1: ended with exit code 17" in str(caught.value)
    whole = Case(name="whole", runner="ranks", recipe=SHORT, world_size=2, accumulation=2)
    assert measure(whole, tmp_path / "whole").agrees


def test_ranks_need_equal_shares_of_the_microbatches(tmp_path: Path) -> None:
    case = Case(name="odd", runner="ranks", recipe=SHORT, world_size=1, accumulation=4)
    assert measure(case, tmp_path / "one").agrees
    odd = Case(name="odd", runner="ranks", recipe=SHORT, world_size=2, accumulation=1)
    with pytest.raises(RuntimeError, match="are not the same for 2 ranks"):
        measure(odd, tmp_path / "two")


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_together_are_the_loader(ranks: int) -> None:
    whole = [batch["input_ids"].tolist() for batch in RaggedLoader(2)]
    shards = [
        [batch["input_ids"].tolist() for batch in Shard(RaggedLoader(2), r, ranks)] for r in range(ranks)
    ]
    assert [len(shard) for shard in shards] == [len(Shard(RaggedLoader(2), r, ranks)) for r in range(ranks)]
    assert [shards[number % ranks][number // ranks] for number in range(len(whole))] == whole


def test_shard_goes_on_where_it_was_saved() -> None:
    shard = Shard(RaggedLoader(2), 1, 2)
    batches = iter(shard)
    for _ in range(5):
        next(batches)
    state, rest = shard.state_dict(), [batch["input_ids"].tolist() for batch in batches]
    resumed = Shard(RaggedLoader(2), 1, 2)
    resumed.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in resumed] == rest
