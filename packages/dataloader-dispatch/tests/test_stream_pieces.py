"""Large texts are encoded in pieces, with the tokens of the whole; encoders see no text but their own."""

from __future__ import annotations

import json
import logging
import os
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from dataloader_dispatch import DataError, DocumentStream, StreamLoader, documents
from dataloader_dispatch.document_encoder import DocumentEncoder

EOS = 0
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
WORDS = ["a", "the", "quick", "brown", "fox", "12", "7", "x" * 20, "naïve", "日本", "don't", "end."]
NUMBERS = {word: 3 + number for number, word in enumerate(WORDS)}
LETTERS = {letter: 3 + number for number, letter in enumerate(sorted({*"".join(WORDS), " ", "\n"}))}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 200 characters in place of 262,144."""
    monkeypatch.setattr(documents, "PIECE", 200)
    monkeypatch.setattr(documents, "LARGE", 400)
    monkeypatch.setattr(documents, "_WINDOW", 24)


def text_of(chance: random.Random, words: int) -> str:
    joints = [" "] * 12 + ["\n", "  ", " \n\n", "\n"]
    return "".join(chance.choice(WORDS) + chance.choice(joints) for _ in range(words))


def letters(text: str) -> list[int]:
    return [LETTERS[letter] for letter in text]


def words(text: str) -> list[int]:
    return [NUMBERS[word] for word in text.split()]


def merged(text: str) -> list[int]:
    """Letters, and one token for a space with the letter behind it, as tokenizers of words have."""
    found, at = [], 0
    while at < len(text):
        pair = text[at] == " " and at + 1 < len(text) and text[at + 1] not in " \n"
        found.append(1000 + LETTERS[text[at + 1]] if pair else LETTERS[text[at]])
        at += 1 + pair
    return found


def around(before: list[int], after: list[int]) -> Callable[[str], list[int]]:
    return lambda text: [*before, *merged(text), *after]


# Name: encoder, the unit that is declared, whether large texts are cut.
ENCODERS: dict[str, tuple[Callable[[str], Any], str | None, bool]] = {
    "bytes": (str.encode, None, True),
    "letters": (letters, "character", True),
    "words": (words, "word", True),
    "merged": (merged, "word", True),
    "begin and end": (around([1], [2]), "word", True),
    "separators": (around([EOS], [EOS]), "word", True),
    "two at the end": (around([], [2, 2]), "word", True),
    "unknown": (merged, None, False),
    # What is declared of these is wrong.
    "merged, by letter": (merged, "character", True),
    "cut off": (lambda text: letters(text)[:150], "word", False),
    "pairs": (lambda text: [len(text[at : at + 2]) for at in range(0, len(text), 2)], "character", True),
    "length": (lambda text: [3 + len(text), *letters(text)], "word", False),
    "first letter": (lambda text: [1000 + LETTERS[text[0]], *letters(text[1:])], "word", False),
    "blank": (lambda text: [5] * len(text.split()), "word", True),
    "nothing": (lambda text: [], "word", False),
}


def stream_of(texts: list[str], name: str, **settings: Any) -> DocumentStream:
    encode, unit, _ = ENCODERS[name]
    arguments = {"sequence_length": 37, "eos_token_id": EOS, "seed": 1, "shards": 2, **settings}
    return DocumentStream(texts, encode=encode, text_unit=unit, **arguments)  # type: ignore[arg-type]


def rows_of(stream: Any) -> list[list[list[int]]]:
    return [[values.tolist() for values in row.values()] for row in stream]


@pytest.mark.parametrize("name", list(ENCODERS))
def test_pieces_have_the_tokens_of_the_whole(
    name: str, small: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode, _, is_cut = ENCODERS[name]
    for seed in range(2 * EXAMPLES):
        chance = random.Random(f"{name} {seed}")
        texts = [text_of(chance, chance.choice([0, 1, 30, 120, 300])) for _ in range(5)] + ["fox " * 150]
        stream = stream_of(texts, name, boundaries=True, sequence_length=chance.choice([5, 37, 999]))
        with monkeypatch.context() as whole:
            whole.setattr(documents, "PIECE", 10**9)
            expected = rows_of(stream.reader()) if name != "nothing" else []
        found = list(DocumentEncoder(texts, encode, None, stream.encoder._pieces.unit)(5))
        assert (len(found) > 1) == is_cut
        if name == "nothing":
            with pytest.raises(DataError, match="hold no text"):
                next(iter(stream))
            continue
        received = []
        for row in stream:
            received += rows_of([row])
            if chance.random() < 0.2 and stream.epoch == 0:  # stop, and resume in another process
                state = json.loads(json.dumps(stream.state_dict()))
                stream = stream_of(texts, name, boundaries=True, sequence_length=stream.sequence_length)
                stream.load_state_dict(state)
                received += rows_of(stream)
                break
        assert received == expected
    told = any("is encoded at once" in record.getMessage() for record in caplog.records)
    assert told or is_cut


def test_a_resume_in_the_middle_encodes_what_is_ahead(small: None) -> None:
    texts = [text_of(random.Random(0), 2000)]
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return merged(text)

    def build() -> DocumentStream:
        settings: dict[str, Any] = {"sequence_length": 16, "eos_token_id": EOS, "shuffle": False}
        return DocumentStream(texts, encode=encode, text_unit="word", **settings)

    expected = rows_of(build())
    stream = build()
    before = [row["labels"].tolist() for _, row in zip(expected[:-20], stream, strict=False)]
    state = stream.state_dict()
    again = build()
    again.load_state_dict(state)
    encoded.clear()
    rest = rows_of(again)
    assert [*before, *(labels for _, labels in rest)] == [labels for _, labels in expected]
    assert sum(encoded) < 3000 < len(texts[0])
    # A position of an earlier release counts tokens only, and is resumed at the same one.
    [place] = state["places"]  # type: ignore[misc]
    assert place[3:] > [0, 0]
    again.load_state_dict({**state, "version": 3, "places": [place[:3]]})
    assert rows_of(again) == rest
    # So is one whose text is no longer cut, and one that was saved when it was not.
    whole = DocumentStream(texts, sequence_length=16, encode=merged, eos_token_id=EOS, shuffle=False)
    whole.load_state_dict(state)
    assert rows_of(whole) == rest
    with pytest.raises(DataError, match=r"is not a position in shard 0"):
        again.load_state_dict({**state, "places": [[*place[:3], place[3], place[1] + 1]]})
    again.load_state_dict({**state, "places": [[0, 10**6, place[2], 10**6, 10**6]]})
    with pytest.raises(DataError, match="token=1000000 is beyond the 0 tokens"):
        next(iter(again))


def test_workers_cut_as_the_process_itself(small: None) -> None:
    texts = [text_of(random.Random(seed), 200) for seed in range(4)]
    reference = rows_of(StreamLoader(stream_of(texts, "begin and end"), 2))
    loader = StreamLoader(stream_of(texts, "begin and end"), 2, num_workers=2)
    received = []
    for batch in loader:
        received += rows_of([batch])
        if len(received) == len(reference) // 2:
            break
    state = loader.state_dict()
    loader = StreamLoader(stream_of(texts, "begin and end"), 2)
    loader.load_state_dict(state)
    assert received + rows_of(loader) == reference


def test_memory_does_not_grow_with_the_text() -> None:
    text = "some words and then some more words " * 300_000
    stream = DocumentStream([text], sequence_length=512, encode=str.encode, eos_token_id=EOS)
    tracemalloc.start()
    rows = sum(1 for _, _ in zip(stream, range(3000), strict=False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (rows, len(text)) == (3000, 10_800_000)
    assert peak < 8 * 8 * documents.PIECE  # a few pieces of int64; the whole would take five times as much


def test_a_large_text_that_cannot_be_cut_is_told_once(small: None, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a" * 500, "fox " * 200, "fox " * 300]
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        rows_of(stream_of(texts, "unknown", shuffle=False))
    [record] = caplog.records
    assert record.getMessage().startswith(
        "document 0 is encoded at once (text_unit='document'), as it is not"
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        rows_of(stream_of(texts, "merged", shuffle=False))
    [record] = caplog.records
    assert "as there is no place at which the tokens of two parts" in record.getMessage()
    with pytest.raises(DataError, match="text_unit='sentence' is unknown"):
        DocumentStream(texts, sequence_length=8, encode=merged, eos_token_id=EOS, text_unit="sentence")  # type: ignore[arg-type]


# What encoders are given


@pytest.mark.parametrize("texts", [["acgtacgt" * 40], ["ac", "gt", "", "tttt"], ["31415926535", "2"]])
def test_an_encoder_sees_nothing_but_parts_of_its_texts(texts: list[str]) -> None:
    numbers = {letter: 1 + number for number, letter in enumerate(sorted(set("".join(texts))))}
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [numbers[letter] for letter in text]  # KeyError for any other

    stream = DocumentStream(
        texts, sequence_length=8, encode=encode, eos_token_id=EOS, shuffle=False, shards=1
    )
    received = [token for row in stream for token in row["labels"].tolist() if token != -100]
    assert received == [token for text in texts if text for token in (*encode(text), EOS)]
    again = DocumentStream(texts, sequence_length=8, encode=encode, eos_token_id=EOS, shuffle=False, shards=1)
    again.load_state_dict(stream.state_dict())
    assert all(any(part in text for text in texts) for part in seen)
    # Other letters of the same alphabet: these tokens are not the same.
    numbers = {letter: 1 + len(numbers) - number for letter, number in numbers.items()}
    other = DocumentStream(texts, sequence_length=8, encode=encode, eos_token_id=EOS, shuffle=False, shards=1)
    with pytest.raises(DataError, match="saved with encoding="):
        other.load_state_dict(stream.state_dict())


def test_encoders_of_whole_documents_only_are_taken_as_they_are() -> None:
    texts = [json.dumps([number, *range(1, 3000)]) for number in range(3)]

    def encode(text: str) -> list[int]:
        return [1 + int(number) for number in json.loads(text)]  # fails for a part, and for nothing

    stream = DocumentStream(texts, sequence_length=100, encode=encode, eos_token_id=EOS)
    assert sum(1 for _ in stream) == -(-3 * 3001 // 100)
    again = DocumentStream(texts, sequence_length=100, encode=encode, eos_token_id=EOS)
    again.load_state_dict(stream.state_dict())


def test_positions_of_the_release_before_are_resumed() -> None:
    """Theirs hold a digest of what the encoder made of two English sentences."""
    texts = ["some text to begin with"] * 3

    def build(encode: Callable[[str], Any] = str.encode) -> DocumentStream:
        return DocumentStream(texts, sequence_length=8, encode=encode, eos_token_id=EOS)

    rows = rows_of(build())
    stream = build()
    next(iter(stream))
    [place] = stream.state_dict()["places"]  # type: ignore[misc]
    former = {**stream.state_dict(), "version": 3, "places": [place[:3]], "encoding": "e4a4e1c3d9b5d3c5"}
    with pytest.raises(DataError, match="saved with encoding='e4a4e1c3d9b5d3c5'"):
        build().load_state_dict(former)
    former["encoding"] = FORMER
    again = build()
    again.load_state_dict(former)
    assert rows_of(again) == rows[1:]
    with pytest.raises(DataError, match="saved with encoding="):
        build(lambda text: [NUMBERS.get(text, 1)]).load_state_dict(former)


FORMER = "b166e9e1a38abd74"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"input_ids": [1]}, r"got a dict with the entries \['input_ids'\]. Return its input_ids"),
        (iter([1, 2]), "got a list_iterator"),
        (5, "got a int"),
        (None, "got a NoneType"),
        ([1.0, 2.0], "dtype torch.float32"),
        ([[1, 2]], r"shape \[1, 2\]"),
        ([-1], "the token id -1"),
        ([2**63], "does not hold token ids"),
        ("text", "does not hold token ids"),
    ],
)
def test_what_is_not_token_ids_is_named(result: object, message: str) -> None:
    with pytest.raises(DataError, match=f"encode's result.*{message}"):
        DocumentStream(["a"], sequence_length=4, eos_token_id=EOS, encode=lambda text: result)  # type: ignore[arg-type,return-value]


def test_documents_left_out_of_tables_of_token_ids_are_empty() -> None:
    class Tables(list[Any]):
        pass

    stream = DocumentStream(
        Tables([[1, 2], "", [3]]), sequence_length=4, eos_token_id=EOS, shuffle=False, shards=1
    )
    assert rows_of(stream)[0][0] == [1, 2, EOS, 3]
    assert stream.left_out == 1


class Named(list[str]):
    """Documents that count as the same data, whatever they hold, as files do whose size has not changed."""

    def fingerprint(self) -> str:
        return "the same"


def test_a_changed_document_is_said_and_not_taken_for_another_encoder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(texts: list[str], encode: Callable[[str], Any] = str.encode) -> DocumentStream:
        return DocumentStream(Named(texts), sequence_length=8, encode=encode, eos_token_id=EOS)

    stream = build(["some text", "and more", "at last"])
    next(iter(stream))
    state = stream.state_dict()
    build(["some text", "and more", "at last"]).load_state_dict(state)
    assert not caplog.records
    build(["SOME text", "AND more", "at last"]).load_state_dict(state)
    [record] = caplog.records
    assert "document 0 has another text than when the position was saved" in record.getMessage()
    assert "(of 3 documents that were looked at, 2)" in record.getMessage()
    with pytest.raises(DataError, match="saved with encoding="):
        build(["SOME text", "AND more", "at last"], lambda text: text.upper().encode()).load_state_dict(state)
