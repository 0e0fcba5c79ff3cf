"""Worker processes: those of StreamLoader, and those of torchdata's StatefulDataLoader."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import (
    DataError,
    DocumentStream,
    StreamLoader,
    TokenDocuments,
    document_stream,
    sync_dataset_state_from_dataloader,
)
from dataloader_dispatch.document_stream import chunks_of_workers

DOCUMENTS = [[100 + number] * (number % 13 + 1) for number in range(60)]


def stream_of(**settings: object) -> DocumentStream:
    arguments = {"sequence_length": 8, "eos_token_id": 0, "seed": 5, "shards": 6, **settings}
    return DocumentStream(TokenDocuments(DOCUMENTS), **arguments)  # type: ignore[arg-type]


def rows_of(batches: object) -> list[list[int]]:
    return [row for batch in batches for row in batch["labels"].tolist()]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine has cores
@pytest.mark.parametrize("workers", [1, 2, 3, 6])
def test_workers_change_neither_the_rows_nor_their_order(workers: int) -> None:
    reference = stream_of(boundaries=True)
    loader = StreamLoader(stream_of(boundaries=True), 4, num_workers=workers)
    for epoch in range(2):
        assert loader.epoch == epoch
        for ours, row in zip(
            [row for batch in loader for row in zip(*batch.values(), strict=True)], reference, strict=True
        ):
            assert all(one.equal(other) for one, other in zip(ours, row.values(), strict=True))


def test_rows_travel_through_a_pipe_and_not_as_file_descriptors() -> None:
    # torch would open a connection for each tensor.
    chunks = list(chunks_of_workers(stream_of(boundaries=True), 2, None))
    kinds = {type(values) for chunk in chunks for values in (chunk.keys, *chunk.examples.values())}
    assert kinds == {list, numpy.ndarray}
    batch = next(iter(StreamLoader(stream_of(), 4, num_workers=2)))
    batch["input_ids"] += 1  # its memory is the caller's


def test_a_worker_position_knows_what_was_received_and_not_what_was_prepared() -> None:
    reference = rows_of(StreamLoader(stream_of(), 4))
    for stop in (1, 3, 7):
        loader = StreamLoader(stream_of(), 4, num_workers=2)
        batches = iter(loader)
        rows = rows_of(next(batches) for _ in range(stop))
        fewer = StreamLoader(stream_of(), 4)
        fewer.load_state_dict(loader.state_dict())
        assert rows + rows_of(fewer) == reference


def test_documents_without_tokens_are_counted_in_workers_too() -> None:
    documents = [[1, 2], [], [3], [0, 0], [], [4, 5, 6], [7], []]
    for workers in (0, 2):
        stream = DocumentStream(TokenDocuments(documents), sequence_length=4, eos_token_id=0, shards=2)
        assert stream.left_out == 0
        for passes in (1, 2):
            list(StreamLoader(stream, 2, num_workers=workers))
            assert stream.left_out == 4 * passes


def test_random_numbers_of_the_run_are_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(StreamLoader(stream_of(), 4, num_workers=1))
    assert torch.rand(3).equal(expected)


def test_stateful_dataloader_delivers_every_document_once_and_goes_on() -> None:
    def build() -> StatefulDataLoader:
        return StatefulDataLoader(stream_of(), batch_size=2, num_workers=2)

    reference = rows_of(build())
    assert sorted(reference) == sorted(rows_of(_unbatched(stream_of())))
    for stop in (1, 4, 9):
        loader = build()
        batches = iter(loader)
        rows = rows_of(next(batches) for _ in range(stop))
        again = build()
        again.load_state_dict(loader.state_dict())
        assert rows + rows_of(again) == reference


def test_state_of_workers_comes_back_to_the_dataset() -> None:
    loader = StatefulDataLoader(stream_of(), batch_size=2, num_workers=2)
    batches = iter(loader)
    rows = rows_of(next(batches) for _ in range(5))

    class Wrapper:
        def __init__(self, loader: object) -> None:
            self.loader = loader

    assert sync_dataset_state_from_dataloader(Wrapper(Wrapper(loader)))
    rest = rows_of(_unbatched(loader.dataset))
    assert sorted(rows + rest) == sorted(rows_of(_unbatched(stream_of())))


@pytest.mark.parametrize("length", [6, 8])
def test_epochs_of_a_stateful_dataloader_follow_one_another(length: int) -> None:
    # Rows end where documents do, documents without tokens are last, or a partial row is left out.
    documents = TokenDocuments([[100 + number] * 5 for number in range(37)] + [[]] * 5)

    def build() -> DocumentStream:
        return DocumentStream(
            documents, sequence_length=length, eos_token_id=0, shards=4, drop_last=True, shuffle=False
        )

    expected = len(list(build()))
    loader = StatefulDataLoader(build(), batch_size=2, num_workers=2)
    for epoch in (1, 2, 3):
        assert len(rows_of(loader)) == expected
        assert sync_dataset_state_from_dataloader(loader)
        assert loader.dataset.epoch == epoch


def test_asking_for_the_state_of_workers_starts_none() -> None:
    loader = StatefulDataLoader(stream_of(), batch_size=2, num_workers=2)
    assert not sync_dataset_state_from_dataloader(loader)
    loader.dataset.set_epoch(3)
    expected = stream_of()
    expected.set_epoch(3)
    assert sorted(rows_of(loader)) == sorted(rows_of(_unbatched(expected)))


def test_nothing_comes_back_where_workers_hold_nothing() -> None:
    assert not sync_dataset_state_from_dataloader(StatefulDataLoader(stream_of(), batch_size=2))
    assert not sync_dataset_state_from_dataloader(StreamLoader(stream_of(), 2, num_workers=2))
    assert not sync_dataset_state_from_dataloader([1, 2])


class Counting(torch.utils.data.IterableDataset[int]):
    """Keeps a position, and cannot make one of several."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> object:
        while self.position < 10:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_one_worker_or_a_way_to_merge_is_needed() -> None:
    one = StatefulDataLoader(Counting(), batch_size=2, num_workers=1)
    next(iter(one))
    assert sync_dataset_state_from_dataloader(one)
    assert one.dataset.position == 2
    two = StatefulDataLoader(Counting(), batch_size=2, num_workers=2)
    next(iter(two))
    with pytest.raises(DataError, match=r"Counting, of which 2 workers hold states.*load_resharded"):
        sync_dataset_state_from_dataloader(two)
    seldom = StatefulDataLoader(Counting(), batch_size=2, num_workers=1, snapshot_every_n_steps=3)
    next(iter(seldom))
    with pytest.raises(DataError, match="snapshot_every_n_steps=1"):
        sync_dataset_state_from_dataloader(seldom)


class Deadly:
    """A document whose reading kills the process that reads it."""

    def __init__(self, folder: Path) -> None:
        self.main = os.getpid()
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int, /) -> list[int]:
        if index == 30 and os.getpid() != self.main and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [index + 1] * 5

    def fingerprint(self) -> str:
        return "deadly"


def test_a_killed_worker_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    def build() -> StreamLoader:
        stream = DocumentStream(Deadly(tmp_path), sequence_length=6, eos_token_id=0, shuffle=False, shards=4)
        return StreamLoader(stream, 2, num_workers=2)

    watch = threading.Timer(60, os._exit, [9])
    watch.start()
    began = time.monotonic()
    loader = build()
    rows: list[list[int]] = []

    def receive() -> None:
        for batch in loader:
            rows.extend(batch["input_ids"].tolist())

    with pytest.raises(RuntimeError, match=r"worker \(pid") as caught:
        receive()
    assert "rank 0 of 1 lost a worker process (num_workers=2)" in caught.value.__notes__[0]
    assert time.monotonic() - began < 30
    again = build()
    again.load_state_dict(loader.state_dict())
    rows += [row for batch in again for row in batch["input_ids"].tolist()]
    assert sorted(row[0] for row in rows) == list(range(1, 41))
    watch.cancel()


def test_a_worker_killed_while_others_are_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = document_stream._start

    def started_slowly(*arguments: Any) -> Any:
        chunks = start(*arguments)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # torch raises here, where it hears of the death
            time.sleep(0.01)
        return chunks

    monkeypatch.setattr(document_stream, "_start", started_slowly)
    stream = DocumentStream(Deadly(tmp_path), sequence_length=6, eos_token_id=0, shuffle=False, shards=4)
    with pytest.raises(RuntimeError, match=r"worker \(pid") as caught:
        next(iter(StreamLoader(stream, 2, num_workers=2)))
    assert "rank 0 of 1 lost a worker process (num_workers=2)" in caught.value.__notes__[0]


def test_an_error_in_a_worker_arrives_as_itself() -> None:
    documents = ["fine"] * 7 + [[1, 2]]
    stream = DocumentStream(documents, sequence_length=4, encode=str.encode, eos_token_id=0, shards=4)
    with pytest.raises(DataError, match="document 7 holds token ids, to which encode"):
        list(StreamLoader(stream, 2, num_workers=2))


class Failing:
    """An encoder that fails as a worker might, at one text."""

    def __call__(self, text: str) -> bytes:
        if text == "bad":
            raise RuntimeError("a worker of mine broke")
        return text.encode()


def test_an_error_is_not_taken_for_the_death_of_a_worker() -> None:
    documents = ["fine"] * 7 + ["bad"]
    stream = DocumentStream(documents, sequence_length=4, encode=Failing(), eos_token_id=0, shards=4)
    with pytest.raises(RuntimeError, match="a worker of mine broke") as caught:
        list(StreamLoader(stream, 2, num_workers=2))
    assert not getattr(caught.value, "__notes__", [])


def test_workers_may_be_spawned() -> None:
    expected = rows_of(StreamLoader(stream_of(), 4))
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        assert rows_of(StreamLoader(stream_of(), 4, num_workers=1)) == expected
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_shards_that_have_ended_do_not_delay_workers() -> None:
    documents = TokenDocuments([torch.ones(200_000, dtype=torch.int64)] * 8)

    def build(rank: int, world_size: int) -> DocumentStream:
        return DocumentStream(
            documents, sequence_length=2, eos_token_id=None, shards=8, rank=rank, world_size=world_size
        )

    ended = {**build(0, 2).state_dict(), "epoch": 1}
    far = build(1, 2).state_dict()
    far["places"] = [[place[0], 180_000, 90_000] for place in far["places"]]  # type: ignore[attr-defined]
    stream = build(0, 1)
    stream.load_resharded([ended, far], rank=0, world_size=1)
    chunks = chunks_of_workers(stream, workers=2, prefetch_factor=2)
    before = list(itertools.takewhile(lambda chunk: not len(chunk.keys), chunks))
    assert len(before) < 10  # and not one for each block of rounds that has been: 90,000 of each worker
    chunks.close()  # type: ignore[attr-defined]


def _unbatched(stream: DocumentStream) -> list[dict[str, torch.Tensor]]:
    return [{name: value[None] for name, value in row.items()} for row in stream]
