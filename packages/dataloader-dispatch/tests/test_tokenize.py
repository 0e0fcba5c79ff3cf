"""The command `tokenize`: what it writes, continues with, refuses and says."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from dataloader_dispatch import DocumentStream, documents, open_documents
from dataloader_dispatch.cli import main
from dataloader_dispatch.cli.output import cut_chunks
from dataloader_dispatch.cli.parts import ByteEncoder
from dataloader_dispatch.sources.files import DataFile, FileRange
from dataloader_dispatch.sources.token_binary import TokenBinary

TEXTS = ["a text\n", "", "ü" * 40, "one", "two", "", "row"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text(TEXTS[0])
    (root / "b.md").write_text(TEXTS[1])
    (root / "c.py").write_text(TEXTS[2])
    lines = [json.dumps({"text": text, "id": 1}) for text in TEXTS[3:6]]
    (root / "d.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[6:]}), root / "sub" / "e.parquet")
    return root


@pytest.fixture
def tokenize(corpus: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the command in this process on the corpus; further arguments as given."""

    def run(*options: object, data: Path = corpus, out: Path = tmp_path / "out", workers: int = 0) -> int:
        fixed = ["tokenize", data, out, "--tokenizer", "bytes", "--workers", workers, "--part-size", "60"]
        return main([str(one) for one in (*fixed, *options)])

    return run


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tokens(directory: Path) -> list[object]:
    source = open_documents(directory)
    assert isinstance(source, TokenBinary)
    source.verify()
    return [source[index].tolist() for index in range(len(source))]


def test_large_texts_are_encoded_in_pieces_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["small", "é large text " * 100, "", "small", "another one, ü" * 70, "end"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--tokenizer", "bytes", "--workers", "0"]
    assert main(["tokenize", str(tmp_path / "in.jsonl"), str(tmp_path / "whole"), *arguments]) == 0
    monkeypatch.setattr(documents, "PIECE", 200)
    monkeypatch.setattr(documents, "_WINDOW", 24)
    encoded: list[int] = []

    def encode(self: ByteEncoder, texts: Sequence[str]) -> list[numpy.ndarray[Any, Any]]:
        encoded.extend(map(len, texts))
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]

    monkeypatch.setattr(ByteEncoder, "encode", encode)
    assert main(["tokenize", str(tmp_path / "in.jsonl"), str(tmp_path / "cut"), *arguments]) == 0
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert tokens(tmp_path / "cut") == [list(text.encode()) for text in texts]
    assert max(encoded) < 400


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
def test_workers_begin_with_what_the_command_has_loaded(
    tokenize: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenize(out=tmp_path / "alone") == 0
    encode, told = ByteEncoder.encode, tmp_path / "processes"

    def tell(self: ByteEncoder, texts: Sequence[str]) -> list[numpy.ndarray[Any, Any]]:
        with told.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return encode(self, texts)

    monkeypatch.setattr(ByteEncoder, "encode", tell)
    assert tokenize(workers=2) == 0
    assert len(set(told.read_text().split()) - {str(os.getpid())}) in (1, 2)
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_the_size_of_parts_follows_from_the_input_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some words"}\n' * 10_000)
    words = ["tokenize", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--tokenizer", "bytes"]
    words += ["--workers", "0"]
    for smallest, parts in ((100_000, 3), (100, 32)):
        monkeypatch.setattr("dataloader_dispatch.cli.tokenize._SMALLEST_PART", smallest)
        assert main([*words, "--overwrite"]) == 0
        assert abs(len(TokenBinary(tmp_path / "out").manifest.parts) - parts) <= 1
    # What was begun with another size, as by an earlier version, is the same work.
    monkeypatch.setattr("dataloader_dispatch.cli.tokenize._PARTS", 7)
    before = content(tmp_path / "out")
    capsys.readouterr()
    assert main(words) == 0
    assert "is finished already" in capsys.readouterr().err
    about = json.loads(before["manifest.json"])["about"]
    (tmp_path / "out" / ".unfinished").mkdir()
    plan = {"settings": about["settings"], "sources": about["sources"]}
    (tmp_path / "out" / ".unfinished" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "out" / "manifest.json").unlink()
    assert main(words) == 0
    assert content(tmp_path / "out") == before


def test_bytes_of_every_kind_of_file(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize() == 0
    assert tokens(tmp_path / "out") == [list(text.encode()) for text in TEXTS]
    source = TokenBinary(tmp_path / "out")
    manifest = source.manifest
    assert (manifest.dtype, manifest.vocabulary_size, manifest.eos_token_id) == ("uint16", 257, 256)
    assert len(manifest.parts) > 1
    assert [(file["name"], file["documents"]) for file in manifest.about["sources"]] == [
        ("a.txt", 1),
        ("b.md", 1),
        ("c.py", 1),
        ("d.jsonl", 3),
        ("sub/e.parquet", 1),
    ]
    said = capsys.readouterr()
    assert "7 documents, 96 tokens" in said.out
    assert "96 B of text as 192 B of uint16" in said.out
    assert "tokenizer bytes, vocabulary 257, separator 256, in no file" in said.out
    assert "0 files and 0 documents that cannot be read" in said.out
    assert "2 without tokens" in said.out
    assert "5 files, 7 documents" in said.err
    assert "documents/s" in said.err
    assert "MB/s" in said.err
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == sorted(
        [".json", *[".bin", ".idx"] * len(manifest.parts)]
    )


def test_a_stream_puts_one_separator_behind_each_document(
    tokenize: Callable[..., int], tmp_path: Path
) -> None:
    assert tokenize() == 0
    source = open_documents(tmp_path / "out")
    assert isinstance(source, TokenBinary)
    stream = DocumentStream(
        source, sequence_length=8, eos_token_id=source.eos_token_id, shuffle=False, shards=1, pad_token_id=999
    )
    found = [token for row in stream for token in row["input_ids"].tolist() if token != 999]
    assert found == [token for text in TEXTS if text for token in (*text.encode(), 256)]


def test_only_what_is_missing_is_made_again(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert tokenize() == 0
    expected = content(out)
    # A run that got as far as this: one part done, one half written, one cut on the disk.
    assert tokenize(out=tmp_path / "other") == 0
    interrupted(tmp_path / "corpus", tmp_path / "unfinished")
    before = (tmp_path / "unfinished" / "part-00000.bin").stat()
    (tmp_path / "unfinished" / ".unfinished" / "part-00002-123.bin").write_bytes(b"half")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        tokenize("--part-size", "none")
    assert tokenize(out=tmp_path / "unfinished") == 0
    assert f"going on: 1 of {(len(expected) - 1) // 2} parts" in capsys.readouterr().err
    assert content(tmp_path / "unfinished") == expected
    after = (tmp_path / "unfinished" / "part-00000.bin").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def interrupted(corpus: Path, out: Path) -> None:
    """Leave what a run leaves that ends behind its first part, at a document that cannot be read."""
    path = corpus / "d.jsonl"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-1] + b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    command = [
        "tokenize",
        str(corpus),
        str(out),
        "--tokenizer",
        "bytes",
        "--workers",
        "0",
        "--part-size",
        "60",
    ]
    assert main(command) == 2
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_finished_directory_is_left_alone(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize() == 0
    before = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert tokenize() == 0
    said = capsys.readouterr()
    assert "finished already" in said.err
    assert "7 documents, 96 tokens" in said.out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == {
        name: status.st_mtime_ns for name, status in before.items()
    }


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--text-column", "body"], "text_column was 'text' and is 'body'"),
        (["--undecodable", "skip"], "undecodable was 'error' and is 'skip'"),
        (["--unreadable", "skip"], "unreadable was 'stop' and is 'skip'"),
        (["--part-size", "100"], "part_size was 60 and is 100"),
        (["--max-document-bytes", "1KB"], "max_document_bytes was 1073741824 and is 1000"),
        (["--exclude", "*.md"], "input b.md is gone"),
    ],
)
def test_other_settings_are_refused_by_name(
    tokenize: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    difference: str,
) -> None:
    (tmp_path / "corpus" / "d.jsonl").unlink()
    shutil.rmtree(tmp_path / "corpus" / "sub")
    assert tokenize() == 0
    before = content(tmp_path / "out")
    assert tokenize(*options) == 2
    assert difference in capsys.readouterr().err
    assert content(tmp_path / "out") == before
    assert tokenize(*options, "--overwrite") == 0
    assert content(tmp_path / "out")["manifest.json"] != before["manifest.json"]
    assert tokenize(*options) == 0


def test_changed_input_is_refused_by_name(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    interrupted(corpus, out)
    changes: list[tuple[Path, bytes | None, str]] = [
        (corpus / "a.txt", b"b text\n", "input a.txt was changed in the meantime"),
        (corpus / "a.txt", b"longer than before", "input a.txt had 7 bytes and has 18"),
        (corpus / "new.txt", b"x", "input new.txt is new"),
        (corpus / "c.py", None, "input c.py is gone"),
    ]
    for path, changed, difference in changes:
        before, status = (path.read_bytes(), path.stat()) if path.exists() else (None, None)
        path.unlink() if changed is None else path.write_bytes(changed)
        capsys.readouterr()
        assert tokenize() == 2
        said = capsys.readouterr().err
        assert difference in said
        assert "--overwrite" in said
        if before is None or status is None:
            path.unlink()
        else:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tokenize() == 0


def test_a_directory_with_something_else_is_never_written(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--overwrite"]):
        assert tokenize(*options, out=tmp_path / "corpus") == 2
        assert "corpus holds something else, 'a.txt' for one" in capsys.readouterr().err
        assert tokenize(*options, out=tmp_path / "corpus" / "a.txt") == 2
        assert "a.txt is not a directory" in capsys.readouterr().err
    assert (tmp_path / "corpus" / "a.txt").read_text() == TEXTS[0]
    out = tmp_path / "out"
    assert tokenize() == 0
    (out / "notes.txt").write_text("mine")
    assert tokenize("--overwrite") == 0
    assert (out / "notes.txt").read_text() == "mine"


def test_damaged_records_are_named_and_overwritten(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert tokenize() == 0
    expected = content(out)
    (out / "manifest.json").write_text("{")
    assert tokenize() == 2
    assert "manifest.json is damaged" in capsys.readouterr().err
    (out / "manifest.json").unlink()
    assert tokenize() == 2
    assert "it holds parts, but not how they were made" in capsys.readouterr().err
    interrupted_plan = out / ".unfinished" / "plan.json"
    interrupted_plan.parent.mkdir()
    for damaged in ("{", "[]", '{"settings": 1, "sources": [1]}'):
        interrupted_plan.write_text(damaged)
        assert tokenize() == 2
        assert "plan.json is damaged" in capsys.readouterr().err
    assert tokenize("--overwrite") == 0
    assert content(out) == expected


def test_two_runs_do_not_write_one_directory(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert tokenize() == 2
    assert "another tokenize command is writing" in capsys.readouterr().err
    os.close(handle)
    assert tokenize() == 0


class _OnlyHere(logging.Filter):
    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def filter(self, record: logging.LogRecord) -> bool:
        return os.getpid() == self._process


def test_unreadable_and_undecodable_documents_are_counted(
    tokenize: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "a.txt").write_bytes(b"caf\xe9")
    (corpus / "d.jsonl").write_text('{broken\n{"text": "two"}\n{"text": 3}\n')
    (corpus / "sub" / "e.parquet").write_bytes(b"cut")
    assert tokenize() == 2
    assert "d.jsonl:1: not valid JSON" in capsys.readouterr().err
    assert tokenize("--unreadable", "skip") == 2
    first = capsys.readouterr().err
    assert "warning: left out a file, as unreadable='skip' says" in first
    assert "a.txt: not UTF-8 at byte 3" in first
    for workers in (0, 1):
        out = tmp_path / f"with-{workers}"
        if workers:
            # As dist_env sets one, for which a forked process is not the one that may speak.
            monkeypatch.setattr(logging.getLogger("dataloader_dispatch"), "filters", [_OnlyHere(os.getpid())])
        assert tokenize("--unreadable", "skip", "--undecodable", "skip", out=out, workers=workers) == 0
        said = capsys.readouterr()
        assert (
            "left out: 1 files and 2 documents that cannot be read; 1 documents not UTF-8 (skip)" in said.out
        )
        assert said.err.count("warning: left out a document") == 1
        assert tokens(out) == [list(text.encode()) for text in ("", "", TEXTS[2], "", "two", "")]
    assert content(tmp_path / "with-0") == content(tmp_path / "with-1")


def test_nothing_to_tokenize(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(data=tmp_path / "nowhere") == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    assert tokenize(data=tmp_path / "blank.jsonl") == 2
    assert "none of the 1 documents has a token" in capsys.readouterr().err
    assert tokenize(out=tmp_path / "tokens") == 0
    assert tokenize(data=tmp_path / "tokens") == 2
    assert "tokens holds token ids already" in capsys.readouterr().err
    pyarrow.parquet.write_table(pyarrow.table({"text": [[1, 2]]}), tmp_path / "ids.parquet")
    assert tokenize(data=tmp_path / "ids.parquet", out=tmp_path / "ids") == 2
    assert "holds token ids, not text" in capsys.readouterr().err


def test_usage_errors_and_help(tokenize: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--workers", "-1"], "'-1' is not an integer of 0 or more"),
        (["--part-size", "0"], "'0' is not a size"),
        (["--undecodable", "ignore"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as stop:
            tokenize(*options)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["tokenize", "--help"])
    assert stop.value.code == 0
    assert "--overwrite" in capsys.readouterr().out


def test_a_full_disk_stops_the_run_and_keeps_what_is_done(
    tokenize: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "corpus" / "f.txt").write_text("x" * 500_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        assert tokenize() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert "cannot be written: File too large" in said
    assert "Run the same command again to continue" in said
    assert tokenize() == 0
    assert "going on" in capsys.readouterr().err
    assert sum(map(len, tokens(tmp_path / "out"))) == 500_096  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 7, 100, 10**9])
def test_chunks_hold_every_document_once(size: int) -> None:
    counts = [3, 0, 1, 50, 1, 0, 7]
    ranges, start = [], 0
    for number, count in enumerate(counts):
        ranges.append(FileRange(DataFile("", str(number), number * 10), start, start + count))
        start += count
    chunks = cut_chunks(ranges, size)
    assert [chunks[0].start, *(chunk.stop for chunk in chunks)] == [*(chunk.start for chunk in chunks), start]
    assert all(chunk.start < chunk.stop for chunk in chunks)
    assert (len(chunks) == 1) == (size == 10**9)


@pytest.mark.parametrize("words", [["--help"], ["tokenize", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_do_without_torch(words: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from dataloader_dispatch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = (
        f"dataloader-dispatch {version('dataloader-dispatch')}\n"
        if words == ["--version"]
        else "Usage: dataloader-dispatch "
    )
    assert done.stdout.startswith(wanted)
