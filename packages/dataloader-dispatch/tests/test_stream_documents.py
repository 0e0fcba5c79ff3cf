"""What a stream makes of its documents: separators, boundaries, mixtures, rows to skip."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dataloader_dispatch import (
    DataError,
    DocumentStream,
    MixedDocuments,
    RowSpan,
    ShuffledIndex,
    StreamLoader,
    TokenDocuments,
    mix_documents,
    passes_for_shares,
    split_documents,
)

EOS = 0


def stream_of(documents: Sequence[Sequence[int]], **settings: object) -> DocumentStream:
    arguments = {"sequence_length": 8, "eos_token_id": EOS, "shuffle": False, "shards": 1, **settings}
    return DocumentStream(TokenDocuments(documents), **arguments)  # type: ignore[arg-type]


def tokens_of(stream: DocumentStream) -> list[int]:
    return [token for row in stream for token in row["labels"].tolist() if token != -100]


# Separators


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: [*text.encode(), EOS],
        lambda text: [EOS, *text.encode()],
        lambda text: [EOS, EOS, *text.encode(), EOS],
    ],
)
def test_an_encoder_with_separators_of_its_own_doubles_none_and_is_told(
    encode: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        stream = DocumentStream(
            ["ab", "", "c"],
            sequence_length=8,
            encode=encode,  # type: ignore[arg-type]
            eos_token_id=EOS,
            shuffle=False,
            shards=1,
        )
        assert tokens_of(stream) == [*b"ab", EOS, *b"c", EOS]
    [record] = caplog.records
    assert "encode gives each text a separator (eos_token_id=0) of its own" in record.getMessage()


def test_an_encoder_that_puts_other_tokens_around_texts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        DocumentStream(
            ["ab"], sequence_length=8, encode=lambda text: [300, *text.encode(), 301], eos_token_id=EOS
        )
    [record] = caplog.records
    assert "[300, 301] around every text" in record.getMessage()
    assert "add_special_tokens=False" in record.getMessage()


def test_a_plain_encoder_is_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        DocumentStream(["ab"], sequence_length=8, encode=str.encode, eos_token_id=EOS)
        stream_of([[1, 2], [3]])
    assert not caplog.records


def test_separators_in_token_documents_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        stream = stream_of([[1, EOS], [EOS, EOS], [2, EOS, 3], [EOS, 4]])
        assert tokens_of(stream) == [1, EOS, 2, EOS, 3, EOS, 4, EOS]
    [record] = caplog.records
    assert record.getMessage().startswith("document 0 holds a separator")


# Boundaries


def test_boundaries_tell_documents_and_positions_apart() -> None:
    rows = list(stream_of([[1, 2, 3], [4], [], [5] * 6, [6]], boundaries=True))
    assert [row["input_ids"].tolist() for row in rows] == [
        [1, 2, 3, EOS, 4, EOS, 5, 5],
        [5, 5, 5, 5, EOS, 6, EOS, 0],
    ]
    assert [row["document_ids"].tolist() for row in rows] == [
        [0, 0, 0, 0, 1, 1, 2, 2],
        [0, 0, 0, 0, 0, 1, 1, -1],
    ]
    assert [row["position_ids"].tolist() for row in rows] == [
        [0, 1, 2, 3, 0, 1, 0, 1],
        [0, 1, 2, 3, 4, 0, 1, 0],
    ]


def test_boundaries_change_nothing_else() -> None:
    documents = [[number] * (number % 9) for number in range(1, 40)]
    plain = list(stream_of(documents, shuffle=True, shards=3))
    marked = list(stream_of(documents, shuffle=True, shards=3, boundaries=True))
    assert all(
        one[name].equal(other[name])
        for one, other in zip(plain, marked, strict=True)
        for name in ("input_ids", "labels")
    )
    for row in marked:
        # A document id changes exactly behind a separator.
        ids, tokens = row["document_ids"].tolist(), row["labels"].tolist()
        for at in range(1, 8):
            assert (ids[at] != ids[at - 1]) == (tokens[at - 1] in (EOS, -100) and ids[at - 1] != -1)


# Rows to skip


def test_skipped_rows_are_missing_and_all_others_are_as_before() -> None:
    documents = [[number] * (number % 9 + 1) for number in range(1, 60)]
    for shards in (1, 4):
        plain = list(stream_of(documents, shards=shards))
        spans = (RowSpan(epoch=0, start=3, stop=6), RowSpan(epoch=1, start=0, stop=2))
        stream = stream_of(documents, shards=shards, skip=spans)
        kept = [row["labels"].tolist() for row in stream]
        assert kept == [row["labels"].tolist() for row in [*plain[:3], *plain[6:]]]
        assert [row["labels"].tolist() for row in stream] == [row["labels"].tolist() for row in plain[2:]]


def test_a_run_goes_on_behind_the_span_that_spoilt_it() -> None:
    documents = [[number] * (number % 9 + 1) for number in range(1, 60)]
    batches = [batch["labels"].tolist() for batch in StreamLoader(stream_of(documents, shards=2), 4)]
    before = StreamLoader(stream_of(documents, shards=2), 4)
    saved = next(iter(before)) and before.state_dict()
    # Updates 2 and 3 of the epoch, with 4 rows in a global batch, are the rows 8 to 15.
    again = StreamLoader(stream_of(documents, shards=2, skip=[RowSpan(epoch=0, start=8, stop=16)]), 4)
    again.load_state_dict(saved)
    assert [batch["labels"].tolist() for batch in again] == [batches[1], *batches[4:]]


def test_a_span_must_hold_rows() -> None:
    for epoch, start, stop in ((-1, 0, 1), (0, 3, 3), (0, -1, 1), ("0", 0, 1), (0, 0.5, 1), (0, -1, None)):
        with pytest.raises(DataError, match="is not a span of rows"):
            RowSpan(epoch=epoch, start=start, stop=stop)  # type: ignore[arg-type]
    for skip in (RowSpan(epoch=0, start=0, stop=1), [(0, 1)], None):
        with pytest.raises(DataError, match="must be a list of RowSpan"):
            stream_of([[1]], skip=skip)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_open_span_leaves_the_first_rows_of_an_epoch(world_size: int, workers: int) -> None:
    """The same rows on any number of ranks and workers; documents behind them are not read."""
    read: set[int] = set()

    class Watched(list[list[int]]):
        def __getitem__(self, index: Any) -> Any:
            read.add(index)
            return super().__getitem__(index)

    texts = [[number] * (number % 9 + 1) for number in range(1, 600)]
    plain = sorted(row["labels"].tolist() for row in islice(stream_of(texts, shards=8), 20))
    found, span = [], RowSpan(epoch=0, start=20, stop=None)
    for rank in range(world_size):
        share = stream_of(Watched(texts), shards=8, rank=rank, world_size=world_size, skip=[span])
        loader = StreamLoader(share, 3, num_workers=workers)
        read.clear()
        found += [row for batch in loader for row in batch["labels"].tolist()]
        assert loader.epoch == 1
    assert sorted(found) == plain
    assert workers or max(read) < 300


def test_an_epoch_that_is_skipped_whole_is_passed_over() -> None:
    stream = stream_of([[1, 2, 3]] * 9, skip=[RowSpan(epoch=0, start=0, stop=1000)])
    assert (list(stream), stream.epoch) == ([], 1)
    with pytest.raises(DataError, match="no row can be made: the 2 documents hold no text"):
        list(stream_of([[], []], skip=[RowSpan(epoch=0, start=5, stop=None)]))
    assert len(tokens_of(stream)) == 36


# Mixtures


def numbers(first: int, count: int) -> TokenDocuments:
    return TokenDocuments([[first + number] for number in range(count)])


def documents_per_epoch(source: MixedDocuments, epochs: int) -> list[Counter[int]]:
    stream = DocumentStream(source, sequence_length=4, eos_token_id=EOS, seed=3, shards=4)
    return [Counter(token for token in tokens_of(stream) if token != EOS) for _ in range(epochs)]


def test_each_source_is_read_as_often_as_its_passes_say() -> None:
    mixture = mix_documents({"a": numbers(100, 30), "b": numbers(200, 8)}, {"a": 0.5, "b": 3})
    assert mixture.documents_per_epoch == {"a": 15, "b": 24}
    first, second, third, fourth = documents_per_epoch(mixture, 4)
    for epoch in (first, second, third, fourth):
        assert {token: count for token, count in epoch.items() if token >= 200} == dict.fromkeys(
            range(200, 208), 3
        )
        assert sum(count for token, count in epoch.items() if token < 200) == 15
    whole = Counter(range(100, 130))
    assert Counter({token: n for token, n in (first + second).items() if token < 200}) == whole
    assert Counter({token: n for token, n in (third + fourth).items() if token < 200}) == whole
    assert first != third


def test_sources_are_mixed_throughout() -> None:
    mixture = mix_documents({"a": numbers(100, 600), "b": numbers(1000, 200)}, {"a": 1, "b": 1})
    order = list(mixture.epoch_order(1, 0, True))
    assert sorted(order) == list(range(800))
    assert order == [mixture.epoch_order(1, 0, True)[position] for position in range(800)]
    assert order[:5] == mixture.epoch_order(1, 0, True)[:5]
    for start in range(0, 800, 200):
        assert 30 <= sum(number >= 600 for number in order[start : start + 200]) <= 70
    assert list(mixture.epoch_order(1, 0, False)) == list(range(800))
    # Both sources have orders of their own: the second is not the first, cut short.
    second = [number - 600 for number in order if number >= 600]
    assert second != [number for number in order if number < 200]
    assert second != list(ShuffledIndex(200, 1))


def test_shares_become_passes() -> None:
    sources = {"web": numbers(0, 900), "code": numbers(5000, 100)}
    passes = passes_for_shares(sources, {"web": 3, "code": 1})
    assert passes == pytest.approx({"web": 1 / 3, "code": 1.0})
    assert mix_documents(sources, passes).documents_per_epoch == {"web": 300, "code": 100}
    longer = passes_for_shares(sources, {"web": 0.5, "code": 0.5}, {"web": 10.0, "code": 1000.0})
    assert longer == pytest.approx({"web": 1.0, "code": 0.09})


def test_mixture_resumes_and_names_its_documents() -> None:
    mixture = mix_documents({"a": numbers(100, 30), "b": numbers(200, 8)}, {"a": 0.5, "b": 3})
    reference = stream_of([[1]])  # only for its type
    stream = DocumentStream(mixture, sequence_length=4, eos_token_id=EOS, seed=3, shards=4)
    rows = [row["labels"].tolist() for row in stream]
    for stop in (0, 1, len(rows) - 1):
        first = DocumentStream(mixture, sequence_length=4, eos_token_id=EOS, seed=3, shards=4)
        head = [row["labels"].tolist() for _, row in zip(range(stop), first, strict=False)]
        reference = DocumentStream(mixture, sequence_length=4, eos_token_id=EOS, seed=3, shards=4)
        reference.load_state_dict(first.state_dict())
        assert head + [row["labels"].tolist() for row in reference] == rows
    assert mixture.where(31) == "b: document 1"
    assert len(mixture) == 38
    with pytest.raises(IndexError, match="document 38"):
        mixture[38]
    other = mix_documents({"a": numbers(100, 30), "b": numbers(200, 8)}, {"a": 1, "b": 3})
    changed = DocumentStream(other, sequence_length=4, eos_token_id=EOS, seed=3, shards=4)
    with pytest.raises(DataError, match=r"saved with documents=39, but the data at hand have documents=54"):
        changed.load_state_dict(reference.state_dict())


@pytest.mark.parametrize(
    "weight", [0, -1.0, float("nan"), float("inf"), "1", None, True, pytest.param(10**400, id="huge")]
)
def test_a_weight_of_zero_is_refused(weight: Any) -> None:
    sources = {"a": numbers(1, 3), "b": numbers(9, 3)}
    with pytest.raises(
        DataError, match=r"passes\['b'\]=.*Leave a source that is not to be read out of sources"
    ):
        mix_documents(sources, {"a": 1, "b": weight})
    with pytest.raises(DataError, match=r"shares\['b'\]="):
        passes_for_shares(sources, {"a": 1, "b": weight})


def test_weights_are_any_numbers_and_what_rounding_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sources = {"a": numbers(1, 10), "b": numbers(20, 3)}
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        for weight in (np.float32(2.0), torch.tensor(2.0), 2):
            assert mix_documents(sources, {"a": 1, "b": weight}).documents_per_epoch == {"a": 10, "b": 6}
        shares = passes_for_shares(sources, {"a": np.float32(1), "b": torch.tensor(1.0)})
        assert mix_documents(sources, shares).documents_per_epoch == {"a": 3, "b": 3}
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        assert mix_documents(sources, {"a": 1, "b": 0.01}).documents_per_epoch == {"a": 10, "b": 1}
    [record] = caplog.records
    assert "passes['b']=0.01 of 3 document(s) are 0.03 in an epoch, and 1 will be read" in record.getMessage()
    for weight in (1e308, 1e16):
        with pytest.raises(DataError, match=r"an epoch of more than 2\*\*48 documents"):
            mix_documents(sources, {"a": 1, "b": weight})


def test_a_mixture_is_neither_split_nor_mixed_again_without_its_passes() -> None:
    mixture = mix_documents({"a": numbers(1, 10), "b": numbers(20, 3)}, {"a": 1, "b": 4})
    with pytest.raises(DataError, match=r"source is a MixedDocuments.* Split each of its sources, and mix"):
        split_documents(mixture, 0.5, seed=0)
    with pytest.raises(DataError, match=r"source 'ab' is a MixedDocuments.* with the product of both passes"):
        mix_documents({"ab": mixture, "c": numbers(30, 5)}, {"ab": 1, "c": 1})


def test_names_of_a_mixture_must_agree() -> None:
    with pytest.raises(DataError, match=r"passes names \['a', 'c'\], but sources names \['a', 'b'\]"):
        mix_documents({"a": numbers(1, 3), "b": numbers(9, 3)}, {"a": 1, "c": 1})
    with pytest.raises(DataError, match="source 'b' has no documents"):
        mix_documents({"a": numbers(1, 3), "b": []}, {"a": 1, "b": 1})
    with pytest.raises(TypeError, match="sources must be a dict by names, but is a list"):
        mix_documents([TokenDocuments([[1]])], [1.0])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="sources is empty"):
        mix_documents({}, {})


# What is not a source, and no encoder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"train": ["a"]}, r"a dict with the keys \['train'\], such as one of splits"),
        ({"a", "b"}, "source is a set, without a length or without numbered documents"),
        ((text for text in "ab"), "source is a generator, without a length"),
    ],
)
def test_what_has_no_numbered_documents_is_named(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DocumentStream(source, sequence_length=4, encode=str.encode, eos_token_id=EOS)


def test_an_encoder_is_a_function() -> None:
    with pytest.raises(DataError, match=r"encode='utf-8' is not a function"):
        DocumentStream(["a"], sequence_length=4, encode="utf-8", eos_token_id=EOS)  # type: ignore[arg-type]


def test_arrays_of_all_kinds_are_token_ids() -> None:
    documents: list[Any] = [
        np.arange(10)[::-3],
        np.array([65535, 1], dtype=np.uint16),
        torch.arange(20, dtype=torch.int32)[::7],
        torch.tensor([2**32 - 1], dtype=torch.uint32),
        np.arange(6).reshape(2, 3)[:, 1],
    ]
    stream = DocumentStream(documents, sequence_length=12, eos_token_id=None, shuffle=False, shards=1)
    [row] = list(stream)
    assert row["input_ids"].tolist() == [9, 6, 3, 0, 65535, 1, 0, 7, 14, 2**32 - 1, 1, 4]
    for wrong in (np.array([2**63], dtype=np.uint64), np.array([-1], dtype=np.int8)):
        with pytest.raises(DataError, match="token ids are not negative"):
            next(iter(DocumentStream([wrong], sequence_length=2, eos_token_id=None)))
