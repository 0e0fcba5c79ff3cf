"""Documents, fingerprints, rows and positions from a real S3 server are those of the same files on a disk."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from s3_bucket import Bucket

from dataloader_dispatch import (
    DataError,
    DocumentSource,
    DocumentStream,
    StreamLoader,
    TokenBinary,
    data_fingerprint,
    mix_documents,
    open_documents,
    split_documents,
)
from dataloader_dispatch.cli import main
from dist_env import die_with_parent_command

EOS = 256


def texts(count: int, name: str) -> list[str]:
    return [f"{name} {number} " + "wörd " * (number % 7) for number in range(count)]


def write_text(folder: Path) -> None:
    for number, text in enumerate(texts(24, "file")):
        path = folder / ("a b" if number % 2 else "ü%41+") / f"{number} x+y%20.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "empty.md").write_text("")
    (folder / ".hidden.txt").write_text("not data")
    (folder / "note.bin").write_text("not data")


def write_lines(folder: Path) -> None:
    for part in range(3):
        lines = [json.dumps({"text": text}) for text in texts(20, f"line {part}")]
        (folder / f"{part}.jsonl").write_text("\n\n".join(lines) + ("\n" if part else ""))


def write_parquet(folder: Path) -> None:
    for part in range(2):
        rows = texts(30, f"row {part}")
        table = pa.table({"other": list(range(30)), "text": rows, "last": rows[::-1]})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=7, use_dictionary=part == 0)


def write_arrow(folder: Path) -> None:
    table = pa.table({"other": list(range(30)), "text": texts(30, "row")})
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    with pa.OSFile(str(folder / "s.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)


def write_tokens(folder: Path) -> None:
    text = folder.parent / "text of tokens"
    text.mkdir()
    write_lines(text)
    arguments = [str(text), str(folder), "--tokenizer", "bytes", "--workers", "0", "--part-size", "2kB"]
    assert main(["tokenize", *arguments]) == 0


KINDS = {
    "text": write_text,
    "lines": write_lines,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "tokens": write_tokens,
}


@pytest.fixture
def both(tmp_path: Path, bucket: Bucket) -> Callable[[str], tuple[DocumentSource, DocumentSource]]:
    """Documents of a kind, opened on the disk and in the store."""

    def make(kind: str) -> tuple[DocumentSource, DocumentSource]:
        folder = tmp_path / kind
        folder.mkdir()
        KINDS[kind](folder)
        return open_documents(folder), open_documents(bucket.upload(folder, kind))

    return make


def listed(source: DocumentSource) -> list[object]:
    documents = [source[index] for index in range(len(source))]
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in documents]


def loader(source: DocumentSource, workers: int = 0) -> StreamLoader:
    tokens = isinstance(source[0], torch.Tensor)
    stream = DocumentStream(
        source,
        sequence_length=16,
        encode=None if tokens else str.encode,
        eos_token_id=EOS,
        seed=5,
        shards=4,
    )
    return StreamLoader(stream, 3, num_workers=workers)


def rows(batches: object) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]  # type: ignore[attr-defined]


def check_same(disk: DocumentSource, store: DocumentSource) -> None:
    assert data_fingerprint(store) == data_fingerprint(disk)
    whole = rows(loader(disk))
    assert rows(loader(store)) == whole
    assert rows(loader(store, workers=2)) == whole
    # A position that was saved at one is loaded at the other.
    for first, second in ((disk, store), (store, disk)):
        begun = loader(first)
        head = rows(islice(begun, 5))
        resumed = loader(second)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert head + rows(resumed) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_format_reads_as_on_a_disk(kind: str, both: Callable[..., tuple[DocumentSource, ...]]) -> None:
    disk, store = both(kind)
    assert len(store) == len(disk) > 20
    assert listed(store) == listed(disk)
    assert listed(store)[:3] == listed(disk)[:3]  # a second time, from the cache
    check_same(disk, store)


def test_mixtures_and_parts_read_as_on_a_disk(both: Callable[..., tuple[DocumentSource, ...]]) -> None:
    (disk_lines, lines), (disk_rows, table) = both("lines"), both("parquet")
    passes = {"lines": 2.0, "rows": 0.5}
    disk, store = (
        mix_documents({"lines": split_documents(one, 0.2, seed=3)[0], "rows": other}, passes)
        for one, other in ((disk_lines, disk_rows), (lines, table))
    )
    check_same(disk, store)


def test_a_copy_in_a_new_process_reads_by_itself(both: Callable[..., tuple[DocumentSource, ...]]) -> None:
    """As the spawned worker of a loader gets it."""
    disk, store = both("lines")
    copy = pickle.dumps(store)
    assert len(copy) < 4000
    script = (
        "import pickle, sys; documents = pickle.load(sys.stdin.buffer); "
        "print(documents[0], documents[len(documents) - 1], sep='\\n')"
    )
    line = die_with_parent_command([sys.executable, "-c", script])
    read = subprocess.run(line, input=copy, stdout=subprocess.PIPE, timeout=120, check=True)
    assert read.stdout.decode().splitlines() == [listed(disk)[0], listed(disk)[-1]]


def test_addresses_are_selected_as_paths_are(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d.md", "b/e/f.txt", ".g/h.txt", "i.txt.gz", "b c/[j].txt"):
        for base in (tmp_path / "disk", None):
            if base is None:
                bucket.put(name, name.encode())
            else:
                (base / name).parent.mkdir(parents=True, exist_ok=True)
                (base / name).write_text(name)
    bucket.put("b/", b"")  # what consoles make of a folder
    bucket.put("empty/", b"")
    disk, store = str(tmp_path / "disk"), bucket.address
    choices: list[tuple[str, list[str]]] = [
        ("", []),
        ("/", []),
        ("/b", []),
        ("/b/", ["*.md"]),
        ("/a.txt", []),
        ("/b/e/f.txt", []),
        ("/b c/[j].txt", []),
        ("/*.txt", []),
        ("/b/*", []),
        ("/**/*.txt", ["e"]),
        ("/**/*.txt", ["b/**"]),
        ("/b*/**", ["b/e", "*.md"]),
        ("", ["**/e/**"]),
    ]
    for end, exclude in choices:
        here, there = (
            open_documents(disk + end, exclude=exclude),
            open_documents(store + end, exclude=exclude),
        )
        assert listed(there) == listed(here), (end, exclude)
        assert there.fingerprint() == here.fingerprint()
    several = [f"{store}/b/e", f"{disk}/a.txt", f"{store}/a.txt", f"file://{disk}/b/c.txt"]
    assert listed(open_documents(several)) == ["b/e/f.txt", "a.txt", "a.txt", "b/c.txt"]
    with pytest.raises(DataError, match=r"a\.txt is named twice"):
        open_documents([store, f"{store}/a.txt"])


def test_what_cannot_be_meant_is_refused_with_the_remedy(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("only/x.bin", b"x")
    bucket.put("zero/a.txt", b"")
    bucket.put("both.txt", b"an object")
    bucket.put("both.txt/below.txt", b"and a folder")
    here = bucket.address
    refusals = {
        f"{here}/missing": "missing does not exist. Name a folder, a glob or an object",
        f"{here}/only": "only/ holds no file that ends in",
        f"{here}/only/x.bin": "x.bin is of no known kind",
        f"{here}/*.jsonl": r"glob .*\*.jsonl holds no file that ends in",
        f"{here}/zero": "the data hold no text",
        f"{here}/both.txt": "is an object, and there are objects below",
        here.replace("://", ":/"): "looks like an address that has lost a slash",
        "memory://a/b": "is memory of this process",
        "hf://datasets/a": "begin with hf:// are not supported",
        "s3://key:secret@bucket/a": "holds more than a bucket and a path. Leave out credentials",
        f"{here}/a/../b": "has a part",
    }
    for address, told in refusals.items():
        with pytest.raises(DataError, match=told) as caught:
            open_documents(address)
        assert "secret" not in str(caught.value)
    with pytest.raises(DataError, match="looks like an address that has lost a slash"):
        open_documents(Path(here))
    assert listed(open_documents(f"{here}/both.txt/")) == ["and a folder"]
    for value in (0, -1, True, "1GB", 1.5):
        with pytest.raises(DataError, match=r"cache_bytes=.* must be a number of bytes of at least 8388608"):
            open_documents(f"{here}/both.txt/", cache_bytes=value)  # type: ignore[arg-type]


def test_bad_objects_are_left_out_as_bad_files_are(bucket: Bucket) -> None:
    bucket.put("data/a.txt", b"good")
    bucket.put("data/b.parquet", b"PAR1 damaged PAR1")
    bucket.put("data/c.jsonl", b'{"text": "one"}\n{"text": 2}\n')
    bucket.put("data/d.txt", b"\xff not UTF-8")
    bucket.put("data/e.arrow", b"ARROW1 damaged")
    with pytest.raises(DataError, match=r"b\.parquet is not a readable Parquet file"):
        open_documents(f"{bucket.address}/data")
    source = open_documents(f"{bucket.address}/data", unreadable="skip", undecodable="replace")
    assert listed(source) == ["good", "one", "", "\ufffd not UTF-8"]
    assert sorted(path.rpartition("/")[2] for path in source.skipped) == ["b.parquet", "c.jsonl", "e.arrow"]
    with pytest.raises(DataError, match=r"d\.txt has 11 bytes, more than max_document_bytes=5"):
        open_documents(f"{bucket.address}/data/d.txt", max_document_bytes=5)[0]


def test_token_directories_are_checked_as_on_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    write_tokens(tmp_path / "tokens")
    address = bucket.upload(tmp_path / "tokens", "tokens")
    source = TokenBinary(address)
    source.verify()
    assert source.where(0) == f"{address}/part-00000.bin document 0"
    part = (tmp_path / "tokens" / "part-00000.bin").read_bytes()
    bucket.put("tokens/part-00000.bin", part[:-2] + b"xx")
    with pytest.raises(DataError, match=r"part-00000\.bin is damaged or not complete: it has the CRC-32"):
        TokenBinary(address).verify()
    bucket.put("tokens/part-00000.bin", part[:-2])
    with pytest.raises(DataError, match=rf"part-00000\.bin .*has {len(part) - 2} bytes"):
        open_documents(address)
    bucket.delete("tokens/part-00000.bin")
    with pytest.raises(DataError, match=r"part-00000\.bin does not exist"):
        open_documents(address)
    bucket.delete("tokens/manifest.json")
    with pytest.raises(DataError, match=r"is not finished: it holds parts and no manifest\.json"):
        open_documents(address)
