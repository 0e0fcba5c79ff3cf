"""Token ids in memory-mapped files: reading, lookup, damage, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch

from dataloader_dispatch import DataError, DocumentSource, data_fingerprint, open_documents
from dataloader_dispatch.sources.part_writer import PartWriter, write_durably
from dataloader_dispatch.sources.token_binary import (
    TokenBinary,
    TokenManifest,
    TokenType,
)

DOCUMENTS = [[[1, 2, 3], [], [4]], [], [[500, 6]], [[7], [8, 9], []]]
FLAT = [document for part in DOCUMENTS for document in part]


def write(
    directory: Path, parts: Sequence[Sequence[Sequence[int]]] = DOCUMENTS, dtype: TokenType = "uint16"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for number, documents in enumerate(parts):
        with PartWriter(directory, f"part-{number:05d}", dtype, 1 << 40, directory) as writer:
            joined = [token for document in documents for token in document]
            writer.append(numpy.array(joined, dtype=numpy.int64), [len(document) for document in documents])
            written.append(writer.finish())
    manifest = TokenManifest(
        dtype=dtype,
        tokenizer="a tokenizer",
        vocabulary_size=1 << 40,
        eos_token_id=0,
        documents=sum(map(len, parts)),
        tokens=sum(len(document) for documents in parts for document in documents),
        parts=tuple(written),
        about={},
    )
    write_durably(directory / "manifest.json", manifest.to_json())
    return directory


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**32 - 1), ("int64", 2**40 - 1)]
)
def test_documents_of_every_type(tmp_path: Path, dtype: TokenType, largest: int) -> None:
    parts = [*DOCUMENTS, [[largest]]]
    source = TokenBinary(write(tmp_path, parts, dtype))
    assert isinstance(source, DocumentSource)
    found = [source[index] for index in range(len(source))]
    assert [one.tolist() for one in found] == [*FLAT, [largest]]
    assert {one.dtype for one in found} == {torch.int64}
    assert (source.num_tokens, source.eos_token_id, source.vocabulary_size) == (10, 0, 1 << 40)
    assert source.where(4) == f"{tmp_path}/part-00003.bin document 0"
    for index in (-1, len(source)):
        with pytest.raises(IndexError, match="8 documents"):
            source[index]
    source.verify()


def test_the_files_are_what_others_expect(tmp_path: Path) -> None:
    write(tmp_path)
    assert numpy.fromfile(tmp_path / "part-00000.bin", "<u2").tolist() == [1, 2, 3, 4]
    assert numpy.fromfile(tmp_path / "part-00000.idx", "<i8").tolist() == [0, 3, 3, 4]
    assert (tmp_path / "part-00001.bin").stat().st_size == 0


def test_what_is_read_is_a_copy_of_the_document_alone(tmp_path: Path) -> None:
    source = TokenBinary(write(tmp_path))
    first = source[0]
    first += 100
    assert first.untyped_storage().nbytes() == 3 * 8
    assert source[0].tolist() == [1, 2, 3]


def test_copies_for_other_processes_are_small_and_hold_no_map(tmp_path: Path) -> None:
    source = TokenBinary(write(tmp_path, [[[1] * 100_000]] * 3))
    before = source[1]
    raw = pickle.dumps(source)
    assert len(raw) < 2_000
    assert pickle.loads(raw)[1].equal(before)


def test_many_parts_do_not_stay_open(tmp_path: Path) -> None:
    source = TokenBinary(write(tmp_path, [[[number]] for number in range(200)]))
    before = len(list(Path("/dev/fd").iterdir()))
    assert [int(source[index]) for index in range(200)] == list(range(200))
    assert len(list(Path("/dev/fd").iterdir())) - before <= 2 * 128


def test_open_documents_opens_a_directory_of_tokens(tmp_path: Path) -> None:
    directory = write(tmp_path / "tokens")
    for data in (directory, str(directory), [directory]):
        source = open_documents(data)
        assert isinstance(source, TokenBinary)
        assert source[0].tolist() == [1, 2, 3]
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        DataError, match=r"tokens holds token ids, and cannot be opened together.*mix_documents"
    ):
        open_documents([tmp_path / "a.txt", directory])
    assert not isinstance(open_documents(tmp_path), TokenBinary)  # a directory above is one of texts


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    first = data_fingerprint(TokenBinary(write(tmp_path / "first")))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    assert data_fingerprint(open_documents(tmp_path / "copy")) == first
    other = [[[1, 2, 3], [], [5]], *DOCUMENTS[1:]]
    shorter = [[[1, 2], [3], [4]], *DOCUMENTS[1:]]
    others = [
        data_fingerprint(TokenBinary(write(tmp_path / str(number), parts)))
        for number, parts in enumerate((other, shorter, DOCUMENTS[:3]))
    ]
    assert len({first, *others}) == 4


def test_a_cut_or_missing_file_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path)
    for name in ("part-00003.bin", "part-00000.idx"):
        raw = (directory / name).read_bytes()
        (directory / name).write_bytes(raw[:-2])
        with pytest.raises(
            DataError, match=rf"{name} is damaged or not complete. it has {len(raw) - 2} bytes"
        ):
            TokenBinary(directory)
        (directory / name).unlink()
        with pytest.raises(DataError, match=rf"{name}: No such file"):
            open_documents(directory)
        (directory / name).write_bytes(raw)
    assert len(TokenBinary(directory)) == len(FLAT)


@pytest.mark.parametrize("offsets", [[1, 3, 3, 4], [0, 3, 2, 4], [0, 3, 3, 5], [0, 9, 3, 4]])
def test_an_index_that_does_not_rise_is_named(tmp_path: Path, offsets: list[int]) -> None:
    directory = write(tmp_path)
    numpy.array(offsets, dtype="<i8").tofile(directory / "part-00000.idx")
    with pytest.raises(DataError, match=r"part-00000\.idx is damaged.*does not rise from 0 to the 4 tokens"):
        TokenBinary(directory)


def test_changed_content_is_found_by_verify(tmp_path: Path) -> None:
    directory = write(tmp_path)
    source = TokenBinary(directory)
    path = directory / "part-00002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"part-00002\.bin is damaged.*CRC-32"):
        source.verify()


def test_a_file_that_goes_while_it_is_open(tmp_path: Path) -> None:
    source = TokenBinary(write(tmp_path))
    (tmp_path / "part-00002.bin").unlink()
    with pytest.raises(DataError, match=r"part-00002\.bin: No such file"):
        source[3]
    (tmp_path / "part-00003.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"part-00003\.bin.*has 0 bytes"):
        source[5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, r"schema_version=2, but this version of dataloader-dispatch reads 1"),
        ({"dtype": "float32"}, r"dtype='float32' is none of"),
        ({"tokens": 8}, r"tokens=8, but the parts hold 9"),
        ({"documents": None}, r"documents=None is not a count"),
        ({"parts": 5}, r"manifest\.json is damaged"),
        ({"parts": [{"name": "../../etc/passwd"}]}, r"is not the name of a part"),
        ({"parts": [{"name": "part-00000"}]}, r"no entry 'documents'"),
        ({"eos_token_id": "x"}, r"eos_token_id='x' is not a count"),
        ({"format": "another"}, r"is not the manifest of a directory that `dataloader-dispatch tokenize`"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        TokenBinary(tmp_path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match=r"manifest\.json is damaged.*--overwrite"):
        open_documents(tmp_path)


def test_directories_that_are_not_finished_or_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no directory .*nowhere"):
        TokenBinary(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"other holds no manifest\.json"):
        TokenBinary(tmp_path / "other")
    directory = write(tmp_path / "tokens")
    (directory / "manifest.json").unlink()
    for opener in (TokenBinary, open_documents):
        with pytest.raises(DataError, match=r"not finished.*Run the same .* command again to finish it"):
            opener(directory)
    with pytest.raises(DataError, match="holds no document"):
        TokenBinary(write(tmp_path / "empty", [[]]))


def test_token_ids_beyond_the_vocabulary_are_not_written(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "part-00000", "uint16", 300, tmp_path) as writer:
        writer.append(numpy.array([299, 0]), [1, 1])
        for bad in ([300], [-1]):
            with pytest.raises(DataError, match="vocabulary has 300 entries"):
                writer.append(numpy.array(bad), [1])
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_is_nested_too_deep_or_names_a_part_twice(tmp_path: Path) -> None:
    path = write(tmp_path, [[[1, 2]]]) / "manifest.json"
    content = json.loads(path.read_text())
    twice = {**content, "parts": content["parts"] * 2, "documents": 2, "tokens": 4}
    path.write_text(json.dumps(twice))
    with pytest.raises(DataError, match=r"manifest\.json is damaged: it names a part twice"):
        TokenBinary(tmp_path)
    path.write_text(
        path.read_text().replace('"about"', '"more": ' + "[" * 100_000 + "]" * 100_000 + ', "about"')
    )
    with pytest.raises(DataError, match=r"manifest\.json is damaged: maximum recursion"):
        TokenBinary(tmp_path)


def test_a_token_that_the_type_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with (
        PartWriter(tmp_path, "part-00000", "uint16", 1 << 40, tmp_path) as writer,
        pytest.raises(DataError, match="token ids from 1 to 65536"),
    ):
        writer.append(numpy.array([1, 65536]), [2])
