"""Documents in the columns of Arrow and Parquet files: text, token ids, and what is damaged."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from dataloader_dispatch import DataError, FileDocuments, open_documents

ROWS = [f"row {number} ü" * (number % 4) for number in range(60)]
TOKENS = [list(range(number % 5)) for number in range(60)]


def write_arrow(path: Path, table: pyarrow.Table, *, stream: bool, compression: str | None = None) -> Path:
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=13)
    return path


def write_parquet(path: Path, table: pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(table, path, row_group_size=13)
    return path


WRITERS: dict[str, Callable[[Path, pyarrow.Table], Path]] = {
    "file.arrow": lambda path, table: write_arrow(path, table, stream=False),
    "stream.arrow": lambda path, table: write_arrow(path, table, stream=True),
    "lz4-file.arrow": lambda path, table: write_arrow(path, table, stream=False, compression="lz4"),
    "lz4-stream.arrow": lambda path, table: write_arrow(path, table, stream=True, compression="lz4"),
    "groups.parquet": write_parquet,
}


@pytest.fixture(params=list(WRITERS))
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[pyarrow.Table], Path]:
    return lambda table: WRITERS[request.param](tmp_path / request.param, table)


def opened(path: Path, column: str, **settings: str) -> FileDocuments:
    source = open_documents(path, text_column=column, **settings)
    assert isinstance(source, FileDocuments)
    return source


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_strings_are_texts(write: Callable[[pyarrow.Table], Path], kind: pyarrow.DataType) -> None:
    path = write(pyarrow.table({"id": list(range(60)), "body": pyarrow.array(ROWS, kind)}))
    source = opened(path, "body")
    order = random.Random(0).sample(range(60), 60)
    assert [source[index] for index in order] == [ROWS[index] for index in order]
    assert source.where(14) == f"{path} row 14"
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[index] for index in order] == [ROWS[index] for index in order]
    assert copy.fingerprint() == source.fingerprint() == opened(path, "body").fingerprint()


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(pyarrow.int32()),
        pyarrow.large_list(pyarrow.uint16()),
        pyarrow.list_(pyarrow.int64()),
    ],
)
def test_integer_lists_are_token_ids(write: Callable[[pyarrow.Table], Path], kind: pyarrow.DataType) -> None:
    path = write(pyarrow.table({"text": ROWS, "ids": pyarrow.array(TOKENS, kind)}))
    source = opened(path, "ids")
    found = [source[index] for index in range(60)]
    assert all(isinstance(one, torch.Tensor) and one.dtype == torch.int64 for one in found)
    assert [one.tolist() for one in found] == TOKENS  # type: ignore[union-attr]
    first = source[4]
    assert isinstance(first, torch.Tensor)
    first += 1  # memory of its own, and not a view of the file
    assert source[4].tolist() == TOKENS[4]  # type: ignore[union-attr]


def test_lists_of_a_fixed_size(write: Callable[[pyarrow.Table], Path]) -> None:
    rows = [[number, number + 1, number + 2] for number in range(30)]
    source = opened(
        write(pyarrow.table({"ids": pyarrow.array(rows, pyarrow.list_(pyarrow.int16(), 3))})), "ids"
    )
    assert [source[index].tolist() for index in range(30)] == rows  # type: ignore[union-attr]


def test_what_is_not_text_and_not_token_ids(write: Callable[[pyarrow.Table], Path]) -> None:
    table = pyarrow.table(
        {
            "text": ["x", None],
            "share": [0.5, 1.0],
            "lists": pyarrow.array([[0.5], []], pyarrow.list_(pyarrow.float32())),
            "holes": pyarrow.array([[1, None], [2]], pyarrow.list_(pyarrow.int32())),
            "huge": pyarrow.array([[2**64 - 1], [1]], pyarrow.list_(pyarrow.uint64())),
        }
    )
    path = write(table)
    for column, held in (("share", "double"), ("lists", "list<.*float>")):
        with pytest.raises(DataError, match=rf"{path.name}: column '{column}' holds {held}.*text_column"):
            opened(path, column)
    with pytest.raises(DataError, match=rf"{path.name} has no column 'body'.*'text', 'share'.*text_column"):
        opened(path, "body")
    with pytest.raises(DataError, match=rf"{path.name} row 1: 'text' is null"):
        opened(path, "text")[1]
    with pytest.raises(DataError, match=rf"{path.name} row 0: 'holes' holds a null among the token ids"):
        opened(path, "holes")[0]
    with pytest.raises(DataError, match=rf"{path.name}.*18446744073709551615"):
        opened(path, "huge")[0]
    twice = write(pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"]))
    with pytest.raises(DataError, match=r"2 columns 'text'"):
        opened(twice, "text")


def test_text_that_is_not_utf8(write: Callable[[pyarrow.Table], Path]) -> None:
    raw = pyarrow.array([b"fine", b"caf\xe9"]).view(pyarrow.string())
    path = write(pyarrow.table({"text": raw}))
    with pytest.raises(DataError, match=rf"{path.name} row 1: not UTF-8 at byte 3"):
        opened(path, "text")[1]
    assert opened(path, "text", undecodable="replace")[1] == "caf\ufffd"
    assert opened(path, "text", undecodable="skip")[1] == ""


def test_only_the_chosen_column_is_read(write: Callable[[pyarrow.Table], Path]) -> None:
    other = [random.Random(number).randbytes(1000) for number in range(60)]
    path = write(pyarrow.table({"other": pyarrow.array(other, pyarrow.binary()), "text": ROWS}))
    raw = path.read_bytes()
    place = raw.index(other[0][:500]) - 40
    # Damage that no reader of that column would survive: its offsets, or its compression.
    path.write_bytes(raw[:place] + b"\xff" * 500 + raw[place + 500 :])
    source = opened(path, "text")
    assert [source[index] for index in range(60)] == ROWS


def test_a_mapped_file_takes_no_memory_for_what_is_not_read(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 1000] * 50_000})
    path = write_arrow(tmp_path / "a.arrow", table, stream=True)
    del table
    before = pyarrow.total_allocated_bytes()
    source = open_documents(path)
    assert source[49_999] == "x" * 1000
    assert pyarrow.total_allocated_bytes() - before < 1_000_000


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_cut_file_is_named(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, pyarrow.table({"text": ROWS}))
    raw = path.read_bytes()
    for length in (0, 3, 7, 100, len(raw) // 2, len(raw) - 8, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(
            DataError, match=rf"{name} is not a readable (Arrow|Parquet) file.*Write it again"
        ):
            open_documents(path)


def problems(path: Path, column: str) -> list[str]:
    """What is said about a file when all of it is read."""
    try:
        source = open_documents(path, text_column=column, undecodable="replace")
    except DataError as error:
        return [str(error)]
    found = []
    for index in range(min(len(source), 100)):
        try:
            source[index]
        except DataError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", list(WRITERS))
def test_damage_anywhere_raises_or_does_no_harm(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, pyarrow.table({"text": ROWS, "ids": TOKENS}))
    raw = path.read_bytes()
    chance = random.Random(name)
    said: list[str] = []
    for _ in range(150):
        damaged = bytearray(raw)
        start = chance.randrange(len(raw))
        damaged[start : start + 30] = chance.randbytes(len(damaged[start : start + 30]))
        path.write_bytes(damaged)
        said += problems(path, "text") + problems(path, "ids")
    assert len(said) > 50
    assert all(name in message for message in said)


def test_a_file_that_has_changed_since_it_was_opened(write: Callable[[pyarrow.Table], Path]) -> None:
    path = write(pyarrow.table({"text": ROWS}))
    source = open_documents(path)
    path.unlink()
    write(pyarrow.table({"text": ROWS[:3]}))
    for index in (1, 59):
        with pytest.raises(DataError, match=r"has \d+ bytes, but had \d+ when it was opened"):
            source[index]
    path.unlink()
    with pytest.raises(DataError, match=rf"{path.name}.*No such file"):
        open_documents_copy(source)[0]


def open_documents_copy(source: object) -> FileDocuments:
    """The same documents in another process, which has read nothing yet."""
    copy = pickle.loads(pickle.dumps(source))
    assert isinstance(copy, FileDocuments)
    return copy


def test_many_mapped_files_do_not_stay_open(tmp_path: Path) -> None:
    for number in range(300):
        write_arrow(tmp_path / f"{number:03}.arrow", pyarrow.table({"text": [str(number)]}), stream=True)
    source = open_documents(tmp_path)
    before = len(list(Path("/dev/fd").iterdir()))
    assert [source[index] for index in range(300)] == [str(number) for number in range(300)]
    assert len(list(Path("/dev/fd").iterdir())) <= before + 1


def test_the_row_groups_kept_are_bounded_over_all_files(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 10_000] * 2000})
    path = tmp_path / "00.parquet"
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    for number in range(1, 40):
        shutil.copy(path, tmp_path / f"{number:02}.parquet")
    source = open_documents(tmp_path)
    before = pyarrow.total_allocated_bytes()
    for index in range(0, len(source), 2000):
        source[index]
    held = pyarrow.total_allocated_bytes() - before
    assert 100 << 20 < held <= 600 << 20
