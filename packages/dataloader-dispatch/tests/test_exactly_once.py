"""Thousands of documents, read by changing numbers of ranks and workers, interrupted again and again."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import chain, islice, zip_longest

import pytest
import torch

from dataloader_dispatch import DataError, DocumentStream, StreamLoader, TokenDocuments

FULL = bool(os.environ.get("FULL_TESTS"))
DOCUMENTS = 10_007 if FULL else 2_503
EOS = 0
LENGTH = 64
SHARDS = 24


class NumberedDocuments:
    """Document i has its number as its first token, and a length of its own."""

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int, /) -> list[int]:
        return [index + 1, *range(20_000, 20_000 + index % 23)]

    def fingerprint(self) -> str:
        return "numbered"


STOPS = [0, 1, 5, 40, 90, 160] if FULL else [0, 1, 3, 10, 22, 40]
TO_END = -1
BEYOND = 10**6


class Job:
    """Ranks that advance together, one batch each in turn, as synchronous training has them."""

    def __init__(self, world_size: int, workers: int, states: list[dict[str, object]] | None = None) -> None:
        self.loaders = []
        for rank in range(world_size):
            stream = DocumentStream(
                NumberedDocuments(),
                sequence_length=LENGTH,
                eos_token_id=EOS,
                seed=11,
                shards=SHARDS,
                rank=rank,
                world_size=world_size,
            )
            if states is not None:
                stream.load_resharded(states, rank=rank, world_size=world_size)
            self.loaders.append(StreamLoader(stream, 4, num_workers=workers))

    def steps(self) -> zip_longest[tuple[dict[str, torch.Tensor] | None, ...]]:
        """The rest of the epoch: at each step one batch of each rank that has one."""
        return zip_longest(*self.loaders)

    def states(self) -> list[dict[str, object]]:
        """What a checkpoint would hold; through JSON, as there."""
        return [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]


def rows_of(batches: tuple[dict[str, torch.Tensor] | None, ...]) -> list[list[int]]:
    return [row for batch in batches if batch is not None for row in batch["labels"].tolist()]


def documents_in(rows: list[list[int]]) -> Counter[int]:
    """How often each document's first token occurs; every other token is a separator, padding or filler."""
    return Counter(token for row in rows for token in row if 0 < token < 20_000)


def tokens_in(rows: list[list[int]]) -> int:
    return sum(token != -100 for row in rows for token in row)


EXPECTED = Counter(range(1, DOCUMENTS + 1))
EXPECTED_TOKENS = sum(2 + index % 23 for index in range(DOCUMENTS))


def test_every_document_comes_once_whatever_the_interruptions_and_changes_of_world_size() -> None:
    chance = random.Random(2026)
    # About 500 rows an epoch (2000 in a full run), so 125 / world steps. A stop after 0 or 1 steps is the
    # second one in a row. TO_END stops with the last batch of the epoch in hand, BEYOND when all were told
    # that there is none.
    stops = [chance.choice(STOPS) for _ in range(18)] + [TO_END, 0, 1, 17, 0, BEYOND, 1, 0]
    worlds = [1, 2, 3, 4]
    states: list[dict[str, object]] | None = None
    world = 0
    interruptions = epochs = 0
    rows: list[list[int]] = []
    pending = iter(stops)
    while interruptions < len(stops) or rows:
        world = chance.choice([size for size in worlds if size != world])
        workers = chance.choice([0, 0, 2])
        job = Job(world, workers, states)
        stop = next(pending, BEYOND)
        if stop == TO_END:
            stop = sum(1 for _ in Job(world, workers, states).steps())
        interruptions += 1
        epoch = min(loader.epoch for loader in job.loaders)
        steps = job.steps()
        for batches in islice(steps, stop):
            rows += rows_of(batches)
        states = job.states()
        check = DocumentStream(
            NumberedDocuments(), sequence_length=LENGTH, eos_token_id=EOS, seed=11, shards=SHARDS
        )
        check.load_resharded(states, rank=0, world_size=1)
        if check.epoch > epoch:
            epochs += 1
            assert documents_in(rows) == EXPECTED
            assert tokens_in(rows) == EXPECTED_TOKENS
            rows = []
        else:
            assert max(documents_in(rows).values(), default=1) == 1
    print(f"{interruptions} interruptions, {epochs} epochs, each with {DOCUMENTS} documents once")
    assert interruptions >= 25
    assert epochs >= 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_resume_without_a_change_continues_the_same_rows(world: int, workers: int) -> None:
    reference = [rows_of(batches) for batches in Job(world, 0).steps()]
    chance = random.Random(world)
    for stop in sorted(chance.sample(range(1, len(reference)), 2)):
        first = Job(world, workers)
        rows = [rows_of(batches) for _, batches in zip(range(stop), first.steps(), strict=False)]
        states = first.states()
        again = Job(world, workers)
        for loader, state in zip(again.loaders, states, strict=True):
            loader.load_state_dict(state)
        rows += [rows_of(batches) for batches in again.steps()]
        assert rows == reference


def test_a_step_has_the_same_rows_for_every_world_size_until_a_shard_ends() -> None:
    together = [
        {tuple(row) for row in rows_of(batches)}
        for batches in zip(*[iter(Job(1, 0).loaders[0])] * 12, strict=False)
    ]
    for world in (2, 3, 4):
        size = 48 // world // 4
        job = Job(world, 0)
        steps = [rows_of(batches) for batches in job.steps()]
        joined = [list(chain(*steps[at : at + size])) for at in range(0, len(steps), size)]
        # The shortest of 24 shards ends after about 19 of 21 rounds.
        for number in range(8):
            assert {tuple(row) for row in joined[number]} == together[number]


def test_states_of_other_ranks_are_refused_with_the_way_out() -> None:
    job = Job(2, 0)
    for _ in zip(range(3), job.steps(), strict=False):
        pass
    zero, one = job.states()
    alone = Job(1, 0).loaders[0]
    with pytest.raises(DataError, match=r"saved by rank 0 of 2, but this is rank 0 of 1.*load_resharded"):
        alone.load_state_dict(zero)
    with pytest.raises(DataError, match="saved by rank 1 of 2, but this is rank 0 of 2"):
        Job(2, 0).loaders[0].load_state_dict(one)
    with pytest.raises(DataError, match="do not cover each of the 24 shards once"):
        alone.load_resharded([zero], rank=0, world_size=1)
    with pytest.raises(DataError, match="do not cover each of the 24 shards once"):
        alone.load_resharded([zero, one, {**one, "epoch": 1}], rank=0, world_size=1)
    with pytest.raises(DataError, match="contradicts the stream, which was made for rank 0 of 1"):
        alone.load_resharded([zero, one], rank=1, world_size=2)
    later = {**one, "epoch": 1}
    with pytest.raises(DataError, match="rank 1 of 2 was in epoch 1 while others were in epoch 0"):
        alone.load_resharded([zero, later], rank=0, world_size=1)
    alone.load_resharded([one, zero], rank=0, world_size=1)
    assert Job(2, 0, [alone.state_dict()]).loaders[1].epoch == 0


def test_too_many_ranks_or_workers_are_refused() -> None:
    five = TokenDocuments([[1]] * 5)
    with pytest.raises(DataError, match=r"5 document\(s\) cannot be divided among 6 rank"):
        DocumentStream(five, sequence_length=4, eos_token_id=0, rank=0, world_size=6)
    with pytest.raises(DataError, match=r"shards=1 cannot be divided among 2 rank.*multiple of 2"):
        DocumentStream(five, sequence_length=4, eos_token_id=0, rank=0, world_size=2)
    with pytest.raises(DataError, match=r"rank=2 must be an integer of at least 0 and below world_size=2"):
        DocumentStream(five, sequence_length=4, eos_token_id=0, rank=2, world_size=2, shards=2)
    stream = DocumentStream(five, sequence_length=4, eos_token_id=0, rank=0, world_size=2, shards=4)
    with pytest.raises(DataError, match=r"shards=4 cannot be divided among 2 rank\(s\) of 3 workers each"):
        StreamLoader(stream, 1, num_workers=3)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_is_over_for_all_ranks_is_over_for_any_other_number(drop_last: bool) -> None:
    # Rows end where documents do, documents without tokens are last, or a partial row is left out.
    documents = TokenDocuments(
        [[number] * 3 for number in range(1, 9)] + [[number, 7] for number in range(8)] + [[]] * 9
    )

    def build(rank: int, world_size: int) -> StreamLoader:
        stream = DocumentStream(
            documents,
            sequence_length=4,
            eos_token_id=EOS,
            shuffle=False,
            shards=4,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        return StreamLoader(stream, 1)

    loaders = [build(rank, 2) for rank in range(2)]
    steps = len(list(zip_longest(*loaders)))
    loaders = [build(rank, 2) for rank in range(2)]
    for _ in islice(zip_longest(*loaders), steps):
        pass
    assert [loader.epoch for loader in loaders] == [0, 0]  # they have not been told that there is no more
    states = [loader.state_dict() for loader in loaders]
    for world_size in (1, 4):
        for rank in range(world_size):
            other = build(rank, world_size)
            other.load_resharded(states, rank=rank, world_size=world_size)
            assert other.epoch == 1
