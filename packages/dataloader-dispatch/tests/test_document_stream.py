"""Rows hold every token once, and the stream of rows is the same however it is interrupted."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dataloader_dispatch import (
    DataError,
    DocumentStream,
    ShuffledIndex,
    StreamLoader,
    TokenDocuments,
    open_documents,
    split_documents,
)

EOS = 0
Stream = list[tuple[list[int], list[int]]]


def token_documents(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Documents of random length, empty ones and ones longer than several rows among them; no two alike."""
    chance = random.Random(seed)
    lengths = [chance.choice([0, 0, 1, 2, chance.randrange(longest), longest]) for _ in range(count)]
    return [
        [1 + number] + [chance.randrange(1, 1000) for _ in range(length - 1)] if length else []
        for number, length in enumerate(lengths)
    ]


def packed(documents: Sequence[Sequence[int]], **settings: object) -> DocumentStream:
    arguments = {"sequence_length": 8, "eos_token_id": EOS, "seed": 3, "shards": 1, **settings}
    return DocumentStream(TokenDocuments(documents), **arguments)  # type: ignore[arg-type]


def rows_of(dataset: DocumentStream, limit: int | None = None) -> Stream:
    rows: Stream = []
    if limit == 0:
        return rows
    for row in dataset:
        assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
        assert row["input_ids"].shape == row["labels"].shape == (dataset.sequence_length,)
        rows.append((row["input_ids"].tolist(), row["labels"].tolist()))
        if len(rows) == limit:
            break
    return rows


def epochs_of(dataset: DocumentStream, epochs: int) -> Stream:
    return [row for _ in range(epochs) for row in rows_of(dataset)]


def tokens_in(rows: Stream) -> list[int]:
    return [token for _, labels in rows for token in labels if token != -100]


def expected_tokens(documents: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """The stream of an epoch, written down the plain way."""
    return [token for number in order if documents[number] for token in [*documents[number], EOS]]


@pytest.mark.parametrize("seed", range(12))
def test_every_document_comes_exactly_once_an_epoch(seed: int) -> None:
    chance = random.Random(seed)
    documents = token_documents(chance.randrange(1, 60), seed)
    documents[0] = documents[0] or [1]
    length = chance.choice([2, 3, 8, 17, 100])
    dataset = packed(documents, sequence_length=length)
    for epoch in range(3):
        assert dataset.epoch == epoch
        rows = rows_of(dataset)
        order = ShuffledIndex(len(documents), 3, epoch)
        assert tokens_in(rows) == expected_tokens(documents, order)
        assert [len(row) for row, _ in rows] == [length] * len(rows)
        padding = sum(labels.count(-100) for _, labels in rows)
        assert padding < length
        assert all(-100 not in labels for _, labels in rows[:-1])
        # Documents recovered at the separators are those that went in.
        found, current = [], []
        for token in tokens_in(rows):
            if token == EOS:
                found.append(current)
                current = []
            else:
                current.append(token)
        assert sorted(found) == sorted(document for document in documents if document)


@pytest.mark.parametrize("shards", [1, 2, 5, 23])
def test_shards_divide_the_documents_and_take_turns(shards: int) -> None:
    documents = [document or [1] for document in token_documents(23, 4)]
    rows = rows_of(packed(documents, shards=shards))
    order = ShuffledIndex(len(documents), 3, 0)
    alone = [
        rows_of(packed([documents[order[i]] for i in range(k, 23, shards)], shuffle=False))
        for k in range(shards)
    ]
    in_turn = [stream[turn] for turn in range(max(map(len, alone))) for stream in alone if turn < len(stream)]
    assert rows == in_turn
    assert sorted(tokens_in(rows)) == sorted(expected_tokens(documents, range(23)))


def test_padding_is_masked_and_uses_the_pad_token() -> None:
    dataset = packed([[5, 6, 7]], pad_token_id=9)
    assert rows_of(dataset) == [([5, 6, 7, EOS, 9, 9, 9, 9], [5, 6, 7, EOS, -100, -100, -100, -100])]


def test_padding_with_the_separator_masks_the_padding_only() -> None:
    dataset = packed([[5, 6]], pad_token_id=EOS, sequence_length=4)
    assert rows_of(dataset) == [([5, 6, EOS, EOS], [5, 6, EOS, -100])]


def test_drop_last_leaves_out_the_partial_row_only() -> None:
    documents = token_documents(20, 1)
    full = rows_of(packed(documents))
    assert -100 in full[-1][1]
    assert rows_of(packed(documents, drop_last=True)) == full[:-1]


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    documents = token_documents(20, 1)
    dataset = packed(documents, shuffle=False)
    for _ in range(2):
        assert tokens_in(rows_of(dataset)) == expected_tokens(documents, range(20))


def test_separator_is_not_doubled_and_may_be_absent() -> None:
    own = [[1, 2, EOS], [3, EOS], [EOS], []]
    dataset = packed(own, shuffle=False)
    assert tokens_in(rows_of(dataset)) == [1, 2, EOS, 3, EOS]
    without = packed([[1, 2], [3]], shuffle=False, eos_token_id=None)
    assert tokens_in(rows_of(without)) == [1, 2, 3]


def test_labels_do_not_share_memory_with_the_input() -> None:
    row = next(iter(packed([[1] * 20])))
    row["labels"].fill_(-100)
    assert (row["input_ids"] == 1).all()


def resumed(
    documents: Sequence[Sequence[int]], dataset: DocumentStream, **settings: object
) -> DocumentStream:
    """A new object that continues from the state of another, by way of a file's worth of JSON."""
    successor = packed(documents, **settings)
    successor.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    return successor


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drop_last": True},
        {"shuffle": False},
        {"sequence_length": 2},
        {"sequence_length": 64},
        {"shards": 3},
        {"shards": 12},
        {"shards": 4, "drop_last": True},
    ],
)
@pytest.mark.parametrize("ending", [[], [[], []], [[7] * 15]])
def test_stream_is_equal_at_every_interrupt_and_a_second_one(
    settings: dict[str, object], ending: list[list[int]]
) -> None:
    documents = token_documents(14, 5) + ending
    reference = epochs_of(packed(documents, **settings), 3)
    one_epoch = len(rows_of(packed(documents, **settings)))
    assert 0 < one_epoch < len(reference)
    for first_stop in range(len(reference) - one_epoch):
        dataset = packed(documents, **settings)
        stream: Stream = []
        while len(stream) < first_stop:
            stream += rows_of(dataset, first_stop - len(stream))
        assert stream == reference[:first_stop]
        dataset = resumed(documents, dataset, **settings)
        for _ in range(2):
            stream += rows_of(dataset, 1 + first_stop % 4)
            dataset = resumed(documents, dataset, **settings)
        while len(stream) < len(reference):
            stream += rows_of(dataset)
        assert stream[: len(reference)] == reference


@pytest.mark.parametrize("ending", [[], [[], []], [[7] * 15]])
def test_state_at_the_exact_end_of_an_epoch_resumes_in_the_next(ending: list[list[int]]) -> None:
    documents = token_documents(14, 5) + ending
    whole = packed(documents)
    count = len(rows_of(whole))
    second = rows_of(whole)

    stopped = packed(documents)
    rows_of(stopped, count)  # the caller received the last row, and did not ask for another
    assert stopped.epoch == 1
    assert stopped.state_dict() == {**packed(documents).state_dict(), "epoch": 1}
    stopped.set_epoch(1)
    once = resumed(documents, stopped)
    twice = resumed(documents, once)
    assert rows_of(twice) == second
    assert rows_of(once, 2) == second[:2]
    assert rows_of(resumed(documents, once)) == second[2:]


def test_abandoned_iteration_goes_on_from_the_cursor() -> None:
    documents = token_documents(20, 2)
    reference = rows_of(packed(documents))
    dataset = packed(documents)
    assert rows_of(dataset, 5) + rows_of(dataset, 1) + rows_of(dataset) == reference


def test_set_epoch_is_a_jump_or_nothing() -> None:
    documents = token_documents(20, 2)
    dataset = packed(documents)
    first, second, third = (rows_of(dataset) for _ in range(3))
    assert first != second != third
    dataset.set_epoch(1)
    assert rows_of(dataset, 4) == second[:4]
    dataset.set_epoch(1)
    assert rows_of(dataset) == second[4:]
    dataset.set_epoch(2)
    assert rows_of(dataset, 3) == third[:3]
    dataset.set_epoch(0)
    assert rows_of(dataset) == first
    with pytest.raises(DataError, match="epoch=-1"):
        dataset.set_epoch(-1)


def test_only_the_newest_iterator_is_valid() -> None:
    dataset = packed(token_documents(20, 2))
    old = iter(dataset)
    next(old)
    new = iter(dataset)
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)
    next(new)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(RuntimeError, match="out of date"):
        next(new)


class CountingDocuments:
    """Documents made up on demand, with a count of how many were asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> list[int]:
        self.read += 1
        return [1 + index % 997] * 12

    def fingerprint(self) -> str:
        return f"{self.count} made-up documents"


def test_state_size_and_restore_cost_do_not_depend_on_the_position() -> None:
    sizes, reads = [], []
    for position in (10, 100_000, 10**9):
        source = CountingDocuments(2 * 10**9)
        dataset = DocumentStream(source, sequence_length=16, eos_token_id=EOS, shards=1)
        state = {**dataset.state_dict(), "places": [[position, 5, 3]]}
        dataset.load_state_dict(state)
        next(iter(dataset))
        reads.append(source.read)
        sizes.append(len(json.dumps(dataset.state_dict())))
    assert reads[0] == reads[1] == reads[2] <= 4
    assert sizes[2] - sizes[0] == len("1000000001") - len("11")  # only the digits of the position itself
    assert max(sizes) < 400


def test_state_after_many_rows_is_as_small_as_at_first() -> None:
    dataset = DocumentStream(CountingDocuments(200_000), sequence_length=64, eos_token_id=EOS, shards=2)
    sizes = []
    iterator = iter(dataset)
    for number in range(4_000):
        next(iterator)
        if number in (9, 3_999):
            sizes.append(len(json.dumps(dataset.state_dict())))
    assert sizes[1] - sizes[0] < 20  # only digits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "saved with seed=3, but the data at hand have seed=4"),
        ({"sequence_length": 9}, "sequence_length=8.*sequence_length=9"),
        ({"shuffle": False}, "shuffle=True.*shuffle=False"),
        ({"eos_token_id": 1}, "eos_token_id=0.*eos_token_id=1"),
    ],
)
def test_state_of_other_settings_is_refused(change: dict[str, object], message: str) -> None:
    documents = token_documents(20, 2)
    dataset = packed(documents)
    rows_of(dataset, 3)
    other = packed(documents, **change)
    before = other.state_dict()
    with pytest.raises(DataError, match=message):
        other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == before


def test_state_of_other_data_or_none_is_refused() -> None:
    documents = token_documents(20, 2)
    dataset = packed(documents)
    rows_of(dataset, 3)
    state = dataset.state_dict()
    with pytest.raises(DataError, match=r"documents=20.*documents=19"):
        packed(documents[:-1]).load_state_dict(state)
    with pytest.raises(DataError, match=r"fingerprint='[0-9a-f]{64}'.*fingerprint='[0-9a-f]{64}'"):
        packed([*documents[:-1], [1, 2, 3, 4, 5]]).load_state_dict(state)
    for damage, message in [
        ({"version": 99}, "version 99"),
        ({"places": [[3, -1, 0]]}, r"\[3, -1, 0\] is not a position in shard 0"),
        ({"places": [[0, 0, 0], [1, 0, 0]]}, "not those of 1 shards"),
        ({"rank": -1}, "rank=-1 is not a count"),
        ({"world_size": 0}, "rank=0 of world_size=0.*damaged"),
        ({"workers": 0}, "worker=0 of workers=0 cannot be"),
        ({"seed": torch.tensor([1, 2])}, "saved with seed=tensor"),
        ({"shuffle": 1}, "saved with shuffle=1"),
        ({"epoch": None}, "epoch=None"),
        ({"places": [[21, 0, 0]]}, r"\[21, 0, 0\] is not a position"),
        ({"shards": 2}, "shards=2.*shards=1"),
    ]:
        with pytest.raises(DataError, match=message):
            packed(documents).load_state_dict({**state, **damage})
    with pytest.raises(DataError, match="version None"):
        packed(documents).load_state_dict({})
    with pytest.raises(DataError, match="saved with encoding=None"):
        packed(documents).load_state_dict({name: state[name] for name in state if name != "encoding"})
    for nothing in (None, [], "state"):
        with pytest.raises(DataError, match="expected what state_dict"):
            packed(documents).load_state_dict(nothing)  # type: ignore[arg-type]
    for nothing in (None, state, "states"):
        with pytest.raises(DataError, match="expected a list of what state_dict"):
            packed(documents).load_resharded(nothing, rank=0, world_size=1)  # type: ignore[arg-type]


def test_position_from_another_tokenizer_is_refused() -> None:
    texts = ["some text to begin with"] * 3
    words = DocumentStream(texts, sequence_length=8, encode=str.encode, eos_token_id=EOS)
    shorter = DocumentStream(texts, sequence_length=8, encode=lambda text: [1, 2], eos_token_id=EOS)
    with pytest.raises(DataError, match="saved with encoding="):
        shorter.load_state_dict(words.state_dict())


def test_position_beyond_its_document_is_noticed() -> None:
    dataset = DocumentStream(CountingDocuments(3), sequence_length=8, eos_token_id=EOS)
    dataset.load_state_dict({**dataset.state_dict(), "places": [[1, 14, 2]]})
    with pytest.raises(DataError, match="token=14 is beyond the 13 tokens"):
        next(iter(dataset))


@pytest.mark.parametrize("kind", [bytes, list, torch.tensor])
def test_encoders_may_return_bytes_lists_or_tensors(kind: type) -> None:
    dataset = DocumentStream(
        ["abcd", "", "efg"],
        sequence_length=5,
        encode=lambda text: kind(list(text.encode())),
        eos_token_id=EOS,
        seed=1,
    )
    documents = [list(b"abcd"), [], list(b"efg")]
    assert tokens_in(rows_of(dataset)) == expected_tokens(documents, ShuffledIndex(3, 1))


def test_encoder_and_documents_must_fit() -> None:
    with pytest.raises(DataError, match="document 0 is text and encode is None"):
        next(iter(DocumentStream(["a"], sequence_length=4, eos_token_id=EOS)))
    with pytest.raises(DataError, match="document 0 holds token ids, to which encode"):
        next(iter(packed([[1]], encode=str.encode)))
    with pytest.raises(DataError, match="encode's result does not hold token ids"):
        DocumentStream(["a"], sequence_length=4, eos_token_id=EOS, encode=lambda text: [text])  # type: ignore[list-item]


@pytest.mark.parametrize("length", [1, 0, True, 2.0])
def test_sequence_length_is_checked(length: int) -> None:
    with pytest.raises(DataError, match="sequence_length="):
        packed([[1]], sequence_length=length)


def test_other_settings_are_checked() -> None:
    for name in ("eos_token_id", "pad_token_id"):
        with pytest.raises(DataError, match=f"{name}=-1"):
            packed([[1]], **{name: -1})
        for value in ("0", 0.5, True, 2**63):
            with pytest.raises(DataError, match=f"{name}="):
                packed([[1]], **{name: value})
    for rank, world_size in (("0", 1), (0, "1"), (0, 0), (0, 1.0), (True, 2), (0, True)):
        with pytest.raises(DataError, match=r"rank=.*world_size="):
            packed([[1]] * 4, rank=rank, world_size=world_size, shards=2)
    for epoch in ("1", 1.0, True, None):
        with pytest.raises(DataError, match="epoch="):
            packed([[1]]).set_epoch(epoch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed"):
        packed([[1]], seed="x", shuffle=False)
    with pytest.raises(TypeError, match="seed"):
        packed([[1]], seed=0.5)
    with pytest.raises(DataError, match="no documents"):
        DocumentStream([], sequence_length=4, eos_token_id=EOS)


def test_data_without_a_row_are_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="2 documents hold no text"):
        rows_of(packed([[], []]))
    with pytest.raises(DataError, match="fewer than sequence_length=8 tokens"):
        rows_of(packed([[1], [2]], drop_last=True))


def test_unreadable_document_leaves_the_position_behind_the_last_batch(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"document {number} ")
    settings = {"sequence_length": 8, "encode": str.encode, "eos_token_id": EOS, "seed": 1}
    reference = rows_of(DocumentStream(open_documents(tmp_path), **settings))

    source = open_documents(tmp_path)
    dataset = DocumentStream(source, **settings)
    loader = StreamLoader(dataset, batch_size=3)
    bad = tmp_path / f"{ShuffledIndex(8, 1)[5]}.txt"
    content = bad.read_bytes()
    bad.unlink()
    received: Stream = []
    states = [loader.state_dict()]

    def receive() -> None:
        for batch in loader:
            received.extend(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
            states.append(loader.state_dict())

    with pytest.raises(DataError, match=bad.name):
        receive()
    assert 0 < len(received) < len(reference)
    assert loader.state_dict() == states[-1]
    bad.write_bytes(content)
    receive()
    assert received == reference


def test_an_encoder_that_fails_has_its_document_named() -> None:
    def encode(text: str) -> bytes:
        return text.encode("ascii")

    dataset = DocumentStream(["a", "é"], sequence_length=4, encode=encode, eos_token_id=EOS)
    with pytest.raises(UnicodeEncodeError) as caught:
        rows_of(dataset)
    assert caught.value.__notes__ == ["while reading document 1"]


def test_skipped_documents_leave_no_trace_in_the_stream(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_text("third")
    source = open_documents(tmp_path, undecodable="skip")
    dataset = DocumentStream(source, sequence_length=12, encode=str.encode, eos_token_id=EOS, shuffle=False)
    assert bytes(tokens_in(rows_of(dataset))) == b"first\0third\0"
    assert source.undecodable == 1


def test_parts_of_a_split_are_packed_independently() -> None:
    documents = [f"<{number}>" for number in range(50)]
    seen = []
    for part in split_documents(documents, 0.2, seed=9):
        dataset = DocumentStream(part, sequence_length=16, encode=str.encode, eos_token_id=EOS, shards=1)
        seen += bytes(tokens_in(rows_of(dataset))).decode().rstrip("\0").split("\0")
    assert sorted(seen) == sorted(documents)


@pytest.mark.parametrize("source", ["one text", b"bytes"])
def test_one_text_is_no_source(source: object) -> None:
    with pytest.raises(DataError, match=r"is one text.*open_documents\(path\)"):
        DocumentStream(source, sequence_length=8, encode=str.encode, eos_token_id=EOS)  # type: ignore[arg-type]
