"""Streams tell a source which documents they read soon: each once, in time, and as a hint only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest

from dataloader_dispatch import DocumentStream, StreamLoader, mix_documents, open_documents, split_documents
from dataloader_dispatch.read_ahead import DOCUMENTS_AHEAD, read_ahead_of

DOCUMENTS = 2000


class Told:
    """Documents that remember what they were told and asked for, in turn."""

    def __init__(self, count: int = DOCUMENTS) -> None:
        self.count = count
        self.events: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> list[int]:
        self.events.append(("read", index))
        return [index + 1] * (1 + index % 5)

    def fingerprint(self) -> str:
        return "told"

    def will_read(self, indices: Sequence[int]) -> None:
        self.events += [("told", index) for index in indices]


class Failing(Told):
    def will_read(self, indices: Sequence[int]) -> None:
        raise OSError("the store is gone")


def stream(source: object, **settings: object) -> DocumentStream:
    return DocumentStream(source, sequence_length=32, eos_token_id=0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("shards", "rank", "world_size"), [(1, 0, 1), (64, 0, 1), (64, 3, 8), (500, 0, 1)])
def test_each_document_is_told_once_and_before_it_is_read(
    shuffle: bool, shards: int, rank: int, world_size: int
) -> None:
    source = Told()
    rows = stream(source, shuffle=shuffle, shards=shards, rank=rank, world_size=world_size)
    source.events.clear()
    for _ in rows:
        pass
    told = Counter(index for what, index in source.events if what == "told")
    read = Counter(index for what, index in source.events if what == "read")
    assert read == told
    assert set(told.values()) == {1}
    assert len(read) == DOCUMENTS // world_size
    outstanding: set[int] = set()
    most = 0
    for what, index in source.events:
        if what == "told":
            outstanding.add(index)
            most = max(most, len(outstanding))
        else:
            outstanding.remove(index)  # it was told before
    assert most <= 2 * max(DOCUMENTS_AHEAD, 3 * shards)


def test_a_resume_tells_only_what_remains() -> None:
    whole, source = stream(Told(), seed=2, shards=8), Told()
    first = [row["input_ids"].tolist() for row in islice(whole, 40)]
    resumed = stream(source, seed=2, shards=8)
    resumed.load_state_dict(whole.state_dict())
    source.events.clear()
    rest = [row["input_ids"].tolist() for row in resumed]
    told = [index for what, index in source.events if what == "told"]
    assert first + rest == [row["input_ids"].tolist() for row in stream(Told(), seed=2, shards=8)]
    assert sorted(told) == sorted(index for what, index in source.events if what == "read")
    assert len(told) < DOCUMENTS


def test_mixtures_and_parts_pass_it_on() -> None:
    one, other, silent = Told(30), Told(50), [[1], [2], [3]]
    remaining, _ = split_documents(other, 0.5, seed=1)
    passes = {"one": 2.0, "other": 1.0, "silent": 1.0}
    mixed = stream(mix_documents({"one": one, "other": remaining, "silent": silent}, passes), shards=2)
    one.events.clear()
    other.events.clear()
    for _ in StreamLoader(mixed, 4):
        pass
    for source in (one, other):
        told, read = ([index for what, index in source.events if what == kind] for kind in ("told", "read"))
        assert Counter(told) == Counter(read)
    assert read_ahead_of(mix_documents({"silent": silent}, {"silent": 1.0})) is None


def test_what_fails_ahead_changes_nothing() -> None:
    failing = [row["input_ids"].tolist() for row in stream(Failing())]
    assert failing == [row["input_ids"].tolist() for row in stream(Told())]


def test_files_on_a_disk_are_not_told(tmp_path: object) -> None:
    source = open_documents(__file__)
    assert read_ahead_of(source) is None
