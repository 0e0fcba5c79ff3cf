"""Every example is scored once, whatever the number of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloader_dispatch import DataError, EvaluationLoader, GlobalMean, shard_for_evaluation

Notes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> Notes:
    ranks = launch("evaluation_four.py", 4, timeout=60)
    assert [rank.code for rank in ranks] == [0] * 4, [rank.err for rank in ranks]
    return [rank.note for rank in ranks]


def test_metrics_of_nine_samples_are_equal_for_one_to_four_ranks(notes: Notes) -> None:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(9, generator=generator)
    loss = (samples.exp() - samples).double().mean().item()
    for rank, note in enumerate(notes):
        for world, scores in enumerate(note["nine samples"], start=1):
            assert scores == ([loss, 1 / 3] if rank < world else None)


def test_uneven_shards_are_scored_once_in_as_many_iterations_as_the_longest(notes: Notes) -> None:
    for note, shard in zip(notes, (85, 167, 239, 247), strict=True):
        *runs, length = note["uneven shards"]
        assert runs == [[247, shard, True]] * 2
        assert length == 247
    assert sum(note["uneven shards"][0][1] for note in notes) == 738


def test_limits_may_differ_between_ranks(notes: Notes) -> None:
    assert [note["limits"] for note in notes] == [[[2 + rank, 5], 5] for rank in range(4)]


def test_ranks_without_an_item_replay_one_that_does_not_count(notes: Notes) -> None:
    seen = [note["some empty"][0] for note in notes]
    assert seen == [[[[5], [True]]], [[[6], [True]]], [[[5], [False]]], [[[5], [False]]]]
    assert [note["some empty"][1] for note in notes] == [5.5] * 4
    (message,) = notes[0]["some empty"][2]
    assert "ranks 2 and 3 of 4 ranks" in message


def test_nothing_to_score_is_an_error_that_names_what_to_look_at(notes: Notes) -> None:
    for note in notes:
        (kind, message), (mean_kind, mean_message) = note["nothing"]
        assert kind == mean_kind == "DataError"
        assert "none of the 4 ranks has a batch (batch_size=2, drop_last=True, items on this rank=" in message
        assert "drop_last" in mean_message


def test_a_batch_without_rows_is_an_error_on_every_rank(notes: Notes) -> None:
    for rank, note in enumerate(notes):
        kind, message = note["without rows"]
        assert kind == ("DataError" if rank == 1 else "RankFailedError")
        assert "batch of type str" in message


def test_a_rank_that_does_not_come_to_a_mean_is_named(notes: Notes) -> None:
    for note in notes[:3]:
        kind, message = note["missing"]
        assert kind == "RankTimeoutError"
        assert "rank 3 (" in message


@pytest.mark.parametrize("world", [1, 2, 3, 7, 30])
def test_shards_are_a_partition(world: int) -> None:
    shards = [shard_for_evaluation(range(100, 123), rank, world) for rank in range(world)]
    items = [[shard[i] for i in range(len(shard))] for shard in shards]
    assert sorted(item for part in items for item in part) == list(range(100, 123))
    assert max(map(len, items)) - min(map(len, items)) <= 1


def test_a_shard_fetches_several_items_at_once_where_the_dataset_can() -> None:
    class Table:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    loader = DataLoader(shard_for_evaluation(Table(), 1, 2), 2)
    assert torch.cat(list(loader)).tolist() == [10, 30, 50, 70, 90]


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (2, 2), (-1, 2)])
def test_a_shard_of_no_rank_is_refused(rank: int, world: int) -> None:
    with pytest.raises(DataError, match=rf"rank={rank} of world_size={world} must be at least 0"):
        shard_for_evaluation([1, 2], rank, world)


def test_an_iterable_dataset_has_no_shards() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(TypeError, match="EvaluationLoader"):
        shard_for_evaluation(Endless(), 0, 2)  # type: ignore[arg-type]


def test_a_single_process_scores_everything() -> None:
    loader = EvaluationLoader(DataLoader(range(5), 2), "cpu")  # type: ignore[arg-type]
    mean = GlobalMean()
    for scored in loader:
        assert not scored.is_stand_in
        mean.add(scored.batch[scored.valid].sum(), scored.valid.sum())
    assert len(loader) == 3
    assert mean.compute() == 2.0
    mean.reset()
    mean.add(7, 2.0)
    assert mean.compute() == 3.5


def test_rows_are_found_in_nested_batches_and_on_the_device() -> None:
    batch = {"name": "x", "scale": torch.tensor(2.0), "inputs": [torch.zeros(4, 3)]}
    (scored,) = EvaluationLoader([batch], "meta")
    assert scored.valid.shape == (4,)
    assert scored.valid.device.type == scored.batch["inputs"][0].device.type == "meta"


def test_nothing_to_score_in_a_single_process_is_an_error() -> None:
    with pytest.raises(DataError, match="none of the 1 ranks has a batch"):
        list(EvaluationLoader([], "cpu"))
    with pytest.raises(DataError, match="nothing was counted"):
        GlobalMean().compute()


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="max_batches=0"):
        EvaluationLoader([], "cpu", max_batches=0)
    with pytest.raises(DataError, match="timeout_seconds=0"):
        GlobalMean(timeout_seconds=0)
    with pytest.raises(DataError, match="timeout_seconds=-1"):
        EvaluationLoader([], "cpu", timeout_seconds=-1)
