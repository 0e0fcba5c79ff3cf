"""`tokenize` reads from a real S3 server and writes to it: what it writes, kills, refusals, two runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from s3_bucket import Bucket
from s3_servers import READER_KEY, READER_SECRET

from dataloader_dispatch import DataError, TokenBinary, open_documents
from dataloader_dispatch.cli import main
from dataloader_dispatch.cli.store_output import StoreOutput
from dataloader_dispatch.store.reader import end_fetchers
from dist_env import open_object_store

OPTIONS = ["--tokenizer", "bytes", "--part-size", "20KB"]


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    open_object_store.cache_clear()


def write_corpus(folder: Path, documents: int = 3000) -> Path:
    chance = random.Random(0)
    folder.mkdir()
    for part in range(2):
        lines = [json.dumps({"text": "wörd " * chance.randrange(12)}) for _ in range(documents // 2)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(bucket: Bucket, name: str) -> dict[str, bytes]:
    names = [one.removeprefix(f"{name}/") for one in bucket.names() if one.startswith(f"{name}/")]
    return {one: bucket.get(f"{name}/{one}") for one in names}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_holds_what_a_disk_would(bucket: Bucket, tmp_path: Path, workers: int) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    address = bucket.upload(corpus, "corpus")
    local, remote = [*OPTIONS, "--workers", "0"], [*OPTIONS, "--workers", str(workers)]
    assert main(["tokenize", str(corpus), str(tmp_path / "disk"), *local]) == 0
    assert main(["tokenize", address, f"{bucket.address}/tokens", *remote]) == 0
    assert main(["tokenize", address, str(tmp_path / "again"), *remote]) == 0  # with workers that are forked
    assert content(tmp_path / "again") == content(tmp_path / "disk")
    assert len(content(tmp_path / "disk")) > 5
    assert stored(bucket, "tokens") == content(tmp_path / "disk")
    assert not list((tmp_path / "temporary").glob("dataloader-dispatch-*-tokenize-*"))
    source = open_documents(f"{bucket.address}/tokens")
    assert isinstance(source, TokenBinary)
    source.verify()
    assert source.fingerprint() == TokenBinary(tmp_path / "disk").fingerprint()


def test_what_is_finished_or_of_another_plan_or_something_else_stays(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = str(write_corpus(tmp_path / "corpus", 100))
    out = f"{bucket.address}/tokens"
    options = [*OPTIONS, "--workers", "0"]
    assert main(["tokenize", corpus, out, *options]) == 0
    before = stored(bucket, "tokens")
    assert main(["tokenize", corpus, out, *options]) == 0
    assert f"{out} is finished already" in capsys.readouterr().err
    assert main(["tokenize", corpus, out, *options, "--text-column", "text", "--part-size", "2KB"]) == 2
    assert "was begun otherwise: part_size was 20000 and is 2000" in capsys.readouterr().err
    assert stored(bucket, "tokens") == before
    assert main(["tokenize", corpus, out, *options, "--part-size", "2KB", "--overwrite"]) == 0
    assert len(stored(bucket, "tokens")) > len(before)
    bucket.put("else/precious.txt", b"precious")
    for place, told in (
        ("else", "holds something else, 'precious.txt' for one"),
        ("tokens/../x", "has a part '.' or '..'"),
    ):
        assert main(["tokenize", corpus, f"{bucket.address}/{place}", *options, "--overwrite"]) == 2
        assert told in capsys.readouterr().err
    assert main(["tokenize", corpus, "s3://tests", *options]) == 2
    assert "OUT s3://tests is a whole bucket" in capsys.readouterr().err
    assert stored(bucket, "else") == {"precious.txt": b"precious"}


def test_what_is_not_finished_is_not_data_and_keeps_others_out(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = str(write_corpus(tmp_path / "corpus", 100))
    out = f"{bucket.address}/tokens"
    assert main(["tokenize", corpus, out, *OPTIONS, "--workers", "0"]) == 0
    whole = stored(bucket, "tokens")
    manifest = json.loads(whole["manifest.json"])["about"]
    sources = [{**one, "modified": None} for one in manifest["sources"]]
    plan = {"settings": {**manifest["settings"], "part_size": 5}, "sources": sources}
    bucket.delete("tokens/manifest.json")
    bucket.put("tokens/.unfinished/plan.json", json.dumps(plan).encode())
    with pytest.raises(DataError, match="tokens is not finished"):
        open_documents(out)
    assert main(["tokenize", corpus, out, *OPTIONS, "--workers", "0"]) == 2
    assert "was begun otherwise: part_size was 5 and is 20000" in capsys.readouterr().err
    assert main(["tokenize", corpus, out, *OPTIONS, "--workers", "0", "--overwrite"]) == 0
    assert stored(bucket, "tokens") == whole


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_killed_and_continued(bucket: Bucket, tmp_path: Path, workers: int) -> None:
    corpus = write_corpus(tmp_path / "corpus", 12_000)
    out = f"{bucket.address}/tokens"
    options = [*OPTIONS, "--workers", str(workers)]
    words = [sys.executable, "-m", "dataloader_dispatch", "tokenize", str(corpus), out, *options]

    def records() -> list[str]:
        return [name for name in bucket.names() if name.startswith("tokens/.unfinished/part-")]

    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(records()) < 4:
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    run.kill()
    run.wait()
    kept = {name: bucket.get(name) for name in records()}
    assert "tokens/manifest.json" not in bucket.names()
    with pytest.raises(DataError, match="tokens is not finished"):
        open_documents(out)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert len(kept) >= 4
    assert f"going on: {len(kept)} of " in done.stderr.replace("\n", " ")
    assert main(["tokenize", str(corpus), str(tmp_path / "disk"), *OPTIONS, "--workers", "0"]) == 0
    assert stored(bucket, "tokens") == content(tmp_path / "disk")


@pytest.mark.parametrize("moment", ["begin", "finished_parts", "record", "recorded", "finish"])
def test_another_finishes_everything_in_the_middle_of_a_task(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    corpus, out = str(write_corpus(tmp_path / "corpus", 1000)), f"{bucket.address}/tokens"
    words = ["tokenize", corpus, out, *OPTIONS, "--workers", "0"]
    method = getattr(StoreOutput, moment)

    def first_another(*values: Any, **named: Any) -> Any:
        monkeypatch.setattr(StoreOutput, moment, method)
        assert main([*words, "--task", "0/1"]) == 0
        return method(*values, **named)

    assert main([*words, "--task", "1/2"]) == 0
    monkeypatch.setattr(StoreOutput, moment, first_another)
    assert main([*words, "--task", "0/2"]) == 0
    assert main(["tokenize", corpus, str(tmp_path / "disk"), *OPTIONS, "--workers", "0"]) == 0
    assert stored(bucket, "tokens") == content(tmp_path / "disk")
    assert not list((tmp_path / "temporary").glob("dataloader-dispatch-*-tokenize-*"))


def test_tasks_at_once_and_twice_and_one_killed(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = str(write_corpus(tmp_path / "corpus", 4000)), f"{bucket.address}/tokens"
    words = [sys.executable, "-m", "dataloader_dispatch", "tokenize", corpus, out, *OPTIONS, "--workers", "0"]

    def start(task: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*words, "--task", task], stderr=subprocess.PIPE, text=True)

    first = start("0/3")
    until = time.monotonic() + 60
    while not any(name.startswith("tokens/part-") for name in bucket.names()):
        assert time.monotonic() < until
        time.sleep(0.005)
    first.kill()
    first.communicate()
    assert main([*words[3:], "--task", "1/3", "--undecodable", "skip"]) == 2
    assert "undecodable was 'error' and is 'skip'" in capsys.readouterr().err
    running = [start(task) for task in ("0/3", "1/3", "0/3", "2/3")]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert main(["tokenize", corpus, str(tmp_path / "disk"), *OPTIONS, "--workers", "0"]) == 0
    assert stored(bucket, "tokens") == content(tmp_path / "disk")
    assert not list((tmp_path / "temporary").glob("dataloader-dispatch-*-tokenize-*"))


def test_without_the_right_to_write_it_says_so(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = str(write_corpus(tmp_path / "corpus", 100))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    end_fetchers()
    open_object_store.cache_clear()
    assert main(["tokenize", corpus, f"{bucket.address}/tokens", *OPTIONS, "--workers", "0"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "cannot be written: the credentials do not permit it" in told
    assert READER_SECRET not in told
    open_object_store.cache_clear()
