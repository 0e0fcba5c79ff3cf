"""What cannot be read stops the run, or is left out and counted, as the setting says."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import resource
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dataloader_dispatch import DataError, FileDocuments, data_fingerprint, open_documents


def skipping(path: Path | list[Path], **settings: object) -> FileDocuments:
    source = open_documents(path, unreadable="skip", **settings)  # type: ignore[arg-type]
    assert isinstance(source, FileDocuments)
    return source


def texts(source: FileDocuments) -> list[object]:
    return [source[index] for index in range(len(source))]


def write_tables(root: Path, rows: list[str]) -> None:
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, root / "c.parquet")
    with (
        pyarrow.OSFile(str(root / "d.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    write_tables(folder, ["first", "second"])
    return folder


@pytest.mark.parametrize(
    ("name", "content", "left"),
    [
        ("b.jsonl", b"{broken\n[1]\n", ["text", "first", "second", "first", "second"]),
        ("c.parquet", b"PAR1 cut off", ["text", "one", "two", "three", "first", "second"]),
        ("d.arrow", b"ARROW1\x00\x00 cut off", ["text", "one", "two", "three", "first", "second"]),
    ],
)
def test_a_damaged_file_is_left_out_and_counted(
    root: Path, name: str, content: bytes, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole = data_fingerprint(open_documents(root))
    assert data_fingerprint(skipping(root)) == whole
    assert skipping(root).skipped == {}
    (root / name).write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        open_documents(root)
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        source = skipping(root)
    assert texts(source) == left
    ((path, skipped),) = source.skipped.items()
    assert (Path(path).name, skipped.whole, skipped.documents) == (name, True, 0)
    assert name in skipped.reason
    assert [record.getMessage() for record in caplog.records] == [
        f"left out a file, as unreadable='skip' says: {skipped.reason}"
    ]
    assert source.files == 4
    # Even where the damage leaves size and number of documents as they were.
    (root / name).write_bytes(b"")
    empty = skipping(root)
    assert data_fingerprint(source) != whole
    assert data_fingerprint(empty) != whole


def test_the_fingerprint_tells_a_file_left_out_from_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    size = (tmp_path / "b.parquet").stat().st_size
    empty = open_documents(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"x" * size)
    damaged = skipping(tmp_path)
    assert len(empty) == len(damaged) == 1
    assert data_fingerprint(empty) != data_fingerprint(damaged)


def test_documents_that_are_malformed_or_gone_later(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "b.jsonl").write_text('{broken\n{"text": "two"}\n{"text": 3}\n{"body": "x"}\n')
    source = skipping(root)
    (root / "a.txt").unlink()
    (root / "c.parquet").unlink()
    (root / "d.arrow").write_bytes(b"nothing like it")
    with caplog.at_level(logging.WARNING, "dataloader_dispatch"):
        assert texts(source) == texts(source) == ["", "", "two", *[""] * 6]
    assert {Path(path).name: one.documents for path, one in source.skipped.items()} == {
        "a.txt": 1,
        "b.jsonl": 3,
        "c.parquet": 2,
        "d.arrow": 2,
    }
    assert not any(one.whole for one in source.skipped.values())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert all(message.startswith("left out a document, as unreadable='skip' says: ") for message in messages)
    assert "No such file" in source.skipped[str(root / "a.txt")].reason
    assert "not valid JSON" in source.skipped[str(root / "b.jsonl")].reason


def test_numbers_of_documents_do_not_change_with_what_is_skipped_later(root: Path) -> None:
    before = skipping(root)
    fingerprint, count = data_fingerprint(before), len(before)
    (root / "a.txt").unlink()
    assert before[0] == ""
    assert (data_fingerprint(before), len(before)) == (fingerprint, count)


def test_a_wrong_column_leaves_out_whole_files_and_then_all(root: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 3 file\(s\) can be read. The first: .*no key 'body'"):
        skipping([root / "b.jsonl", root / "c.parquet", root / "d.arrow"], text_column="body")
    (root / "e.jsonl").write_text('{"body": "found"}')
    source = skipping(root, text_column="body")
    assert texts(source) == ["text", "found"]
    assert sum(skipped.whole for skipped in source.skipped.values()) == 3


def test_files_that_must_not_be_read_or_are_no_files(
    ordinary_user: Callable[[], AbstractContextManager[None]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for file in ("a.txt", "b.txt"):
            (root / file).write_text(file)
        (root / "c.txt").symlink_to(root / "nowhere.txt")
        os.mkfifo(root / "d.txt")
        (root / "b.txt").chmod(0)
        with ordinary_user():
            with pytest.raises(DataError, match=r"b\.txt: no permission"):
                open_documents([root / "a.txt", root / "b.txt"])
            source = skipping(root)
            assert texts(source) == ["a.txt"]
            assert {Path(path).name for path in source.skipped} == {"b.txt", "c.txt", "d.txt"}
            # The right is taken away after opening.
        (root / "a.txt").chmod(0)
        with ordinary_user():
            with pytest.raises(DataError, match=r"a\.txt: Permission denied"):
                open_documents_without_right(root / "a.txt")
            assert source[0] == ""
            assert "Permission denied" in source.skipped[str(root / "a.txt")].reason


def open_documents_without_right(path: Path) -> object:
    """Read what could be opened, but not read."""
    from dataloader_dispatch.sources.files import DataFile, ReadSettings, TextReader

    settings = ReadSettings("text", 1 << 30, skip=False)
    files = [DataFile(str(path), path.name, 5)]
    return FileDocuments(files, "error", settings, lambda file: TextReader(file.path, file.size, settings))[0]


def test_running_out_of_open_files_is_not_blamed_on_the_data(root: Path) -> None:
    source = pickle.loads(pickle.dumps(skipping(root)))  # which has nothing open
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Nor may what earlier tests have left be closed amid this.
    gc.collect()
    gc.disable()
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for index in (0, 1, 4, 6):
            with pytest.raises(DataError, match=r"Too many open files. Raise the limit .*ulimit -n"):
                source[index]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        gc.enable()
        for filler in fillers:
            os.close(filler)
    assert source.skipped == {}
    assert texts(source) == ["text", "one", "two", "three", "first", "second", "first", "second"]


def test_a_document_larger_than_allowed_is_known_before_it_is_read(tmp_path: Path) -> None:
    huge = tmp_path / "a.txt"
    with huge.open("wb") as stream:
        stream.truncate(1 << 42)  # takes no room on the disk, and would take 4 TiB of memory
    with pytest.raises(
        DataError,
        match=r"a\.txt has 4398046511104 bytes, more than max_document_bytes=1073741824. Split it, raise "
        r"max_document_bytes.*unreadable='skip'",
    ):
        open_documents(huge)[0]
    source = skipping(huge)
    assert source[0] == ""
    assert source.skipped[str(huge)].documents == 1


def test_the_size_limit_in_lines_and_tables(root: Path) -> None:
    long = "x" * 2000
    (root / "a.txt").write_text(long)
    (root / "b.jsonl").write_text(f'{{"text": "one"}}\n\n{{"text": "{long}"}}\n{{"text": "three"}}\n')
    write_tables(root, ["first", long])
    source = open_documents(root, max_document_bytes=1000)
    assert [source[index] for index in (1, 3, 4, 6)] == ["one", "three", "first", "first"]
    for index, place in (
        (0, r"a\.txt"),
        (2, r"b\.jsonl:3"),
        (5, r"c\.parquet row 1"),
        (7, r"d\.arrow row 1"),
    ):
        with pytest.raises(DataError, match=rf"{place} has 20\d\d bytes, more than max_document_bytes=1000"):
            source[index]
    left = skipping(root, max_document_bytes=1000)
    assert texts(left) == ["", "one", "", "three", "first", "", "first", ""]
    assert {one.documents for one in left.skipped.values()} == {1}
    assert texts(skipping(root, max_document_bytes=2100)).count(long) == 4


def test_a_long_line_is_not_held_in_memory_while_lines_are_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "small"}\n')
        stream.seek(100 << 20, os.SEEK_CUR)  # one line of zeros
        stream.write(b'\n{"text": "last"}')
    tracemalloc.start()
    source = open_documents(path, max_document_bytes=1 << 20)
    assert (len(source), source[0], source[2]) == (3, "small", "last")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_json_that_cannot_be_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "\\ud83d\\ude00"}',
        '{"text": "half \\ud83d"}',
        "[" * 100_000,
        '{"text": ' + "9" * 5000,
    ]
    path.write_text("\n".join(lines))
    source = open_documents(path)
    assert source[0] == "\N{GRINNING FACE}"
    with pytest.raises(DataError, match=r"a\.jsonl:2: not text.*surrogates"):
        source[1]
    assert open_documents(path, undecodable="replace")[1] == "half \ufffd"
    for index in (2, 3):
        with pytest.raises(DataError, match=rf"a\.jsonl:{index + 1}: not valid JSON"):
            source[index]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"unreadable": "ignore"}, r"unreadable='ignore' is unknown.*'stop', 'skip'"),
        ({"max_document_bytes": 0}, r"max_document_bytes=0 must be an integer"),
        ({"max_document_bytes": 1.5}, r"max_document_bytes=1.5 must be an integer"),
        ({"max_document_bytes": True}, r"max_document_bytes=True must be an integer"),
    ],
)
def test_settings_out_of_range(root: Path, setting: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_documents(root, **setting)  # type: ignore[arg-type]


def test_without_a_readable_file_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"cut")
    (tmp_path / "b.arrow").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"none of the 2 file\(s\) can be read. The first: .*a\.parquet"):
        skipping(tmp_path)
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "x"}))
    assert texts(skipping(tmp_path)) == ["x"]
