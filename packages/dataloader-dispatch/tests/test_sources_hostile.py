"""Whatever a folder holds: documents as they are, an error that names the file, or a warning."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dataloader_dispatch import DataError, DocumentSource, open_documents

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))


def texts(source: DocumentSource) -> list[Any]:
    return [source[index] for index in range(len(source))]


# Names and links


def test_links_in_a_circle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        assert texts(open_documents(tmp_path)) == ["a"]
    [record] = caplog.records
    assert "1 link(s) to directories or compressed file(s), which are passed over" in record.getMessage()
    assert str(tmp_path / "sub" / "up") in record.getMessage()
    caplog.clear()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert texts(open_documents(tmp_path, exclude="sub")) == ["a"]
    (tmp_path / "b.txt").symlink_to("b.txt")
    for data in (tmp_path, f"{tmp_path}/*.txt", tmp_path / "b.txt"):
        with pytest.raises(DataError, match=r"b\.txt: Too many levels of symbolic links"):
            open_documents(data)
    source = open_documents(tmp_path, unreadable="skip", exclude="sub")
    assert texts(source) == ["a"]
    for data in (tmp_path / "one" / "x.txt", f"{tmp_path}/one/*.txt", tmp_path / "one"):
        with pytest.raises(DataError, match=r"does not exist|cannot read the directory|of no known kind"):
            open_documents(data)


def test_what_looks_like_data_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}'))
    (tmp_path / "picture.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        assert texts(open_documents(tmp_path)) == ["about"]
    [record] = caplog.records
    assert f"(first: {tmp_path}/a.jsonl.gz)" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        open_documents(tmp_path, exclude="*.gz")
        open_documents(f"{tmp_path}/*.md")
    assert not caplog.records
    (tmp_path / "b.md").symlink_to("README.md")
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        assert texts(open_documents(tmp_path, exclude="*.gz")) == ["about", "about"]
    [record] = caplog.records
    assert "are one file, by a link: its documents come twice an epoch" in record.getMessage()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a\0b.txt", "holds a NUL character"),
        ("a\0b/*.txt", "holds a NUL character"),
        (b"a.txt", "data=b'a.txt' is not a path"),
        ([b"a.txt"], "b'a.txt' is not a string or a path"),
        (5, "data=5 is not a path"),
        ([None], "data path None is not"),
        ("x" * 5000 + ".txt", "cannot be looked up: File name too long"),
        ("~nobody-of-that-name/a.txt", "cannot be looked up: Could not determine home directory"),
        ([], "the list of paths is empty"),
    ],
)
def test_what_is_not_a_path_is_named(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_documents(data)


def test_odd_names_are_names(tmp_path: Path) -> None:
    for number, name in enumerate([b"a\xff.txt", b"b\n.txt", b"c [x] *.txt", b" .txt"]):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(str(number))
    assert sorted(texts(open_documents(tmp_path))) == ["0", "1", "2", "3"]


# JSON lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "one", "text": "two"}', r":2: the key 'text' comes twice"),
        (r'{"text": "one", "te\u0078t": "two"}', r":2: the key 'text' comes twice"),
        ('{"text": "one", "m": {"text": 5, "text": 6}, "b": 1, "b": 2}', "one"),
        ('{"text": "the \\"text\\" is \\u00e9"}', 'the "text" is é'),
        ('{"te\\u0078t": "escaped"}', "escaped"),
        ('{"text": "x", "n": 1e999999}', "x"),
        ('{"text": "x", "n": ' + "9" * 5000 + "}", ":2: not valid JSON .*4300"),
        ('{"text": "x", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", ":2: not valid JSON .*recursion"),
        ('{"text": ' + "[" * 900 + "]" * 900 + "}", r":2: 'text' holds \[\[.*which is not a string"),
        ('{"text": null}', ":2: 'text' holds None"),
        ('{"txt": 1}', r":2: no key 'text', but the keys \['txt'\]"),
        (json.dumps(dict.fromkeys(map(str, range(10**5)))), ":2: .*'10013'] and more, 100000 in all"),
        ('{"text": "cut', ":2: not valid JSON"),
        ("\0\0", ":2: not valid JSON"),
    ],
    ids=range(14),
)
def test_a_line_is_a_document_or_a_named_error(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + '\n{"text": "last"}\n')
    source = open_documents(path)
    assert (source[0], source[2]) == ("fine", "last")
    if found.startswith(":2"):
        with pytest.raises(DataError, match=r"a\.jsonl" + found) as caught:
            source[1]
        assert len(str(caught.value)) < 1000
        assert open_documents(path, unreadable="skip")[1] == ""
    else:
        assert source[1] == found


# Files that change


def table(path: Path, rows: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)


def arrow(path: Path, rows: list[str]) -> None:
    content = pyarrow.table({"text": rows})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content)


def lines(path: Path, rows: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.txt": lambda path, rows: path.write_text(rows[0]),
    "a.jsonl": lines,
    "a.parquet": table,
    "a.arrow": arrow,
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_file_that_was_changed_gives_no_other_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, ["one", "two"])
    source, skipping = open_documents(path), open_documents(path, unreadable="skip")
    before = path.read_bytes()
    for rows in (["ONE and more " * 9, "two"], ["longer " * 900, "two", "three"]):
        WRITERS[name](path, rows)
        with pytest.raises(DataError, match=rf"{name} has \d+ bytes, but had \d+ when it was opened"):
            source[0]
        assert skipping[0] == ""
    path.write_bytes(before)
    assert source[0] == "one"


def test_a_file_of_lines_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines(path, ["one", "two", "three"])
    source = open_documents(path)
    assert source[0] == "one"  # and the file stays open
    with path.open("r+b") as stream:
        stream.truncate(20)
    for index in range(3):
        with pytest.raises(DataError, match=r"a\.jsonl has 20 bytes, but had 50 when it was opened"):
            source[index]


# Tables


def test_a_column_is_told_from_a_field_of_the_same_path(tmp_path: Path) -> None:
    columns = {"a": [{"b": "wrong", "c": 1}], "a.b": ["right"], "a.c": [[1, 2]], "text.more": ["wrong"]}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "text": ["right"]}), tmp_path / "a.parquet")
    assert texts(open_documents(tmp_path)) == ["right"]
    assert texts(open_documents(tmp_path, text_column="a.b")) == ["right"]
    assert [one.tolist() for one in texts(open_documents(tmp_path, text_column="a.c"))] == [[1, 2]]


@pytest.mark.parametrize("name", list(WRITERS))
def test_damage_is_named_or_does_no_harm(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, ["abc" * 5, "d", "e" * 100] * 5)
    whole = path.read_bytes()
    for seed in range(40 * EXAMPLES):
        chance = random.Random(seed)
        raw = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3, 10])):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(raw[: chance.randrange(len(raw))] if chance.random() < 0.2 else raw)
        try:
            texts(open_documents(path))
        except DataError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017  (most damage in a text does no harm)
