"""The cache on the disk: its limit, eviction while it is read, what killed writers leave, two jobs."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from s3_bucket import Bucket

from dataloader_dispatch import DataError, DocumentStream, StreamLoader, open_documents
from dataloader_dispatch.store.block_cache import BLOCK_BYTES, SMALL_BLOCK_BYTES, BlockCache
from dataloader_dispatch.store.reader import (
    LIMIT_VARIABLE,
    SMALLEST_LIMIT,
    StoredFile,
    cache_settings,
    find_object,
)
from dist_env import StoreError

MB = 1 << 20


def noise(size: int, seed: int = 0) -> bytes:
    """Letters that repeat nowhere."""
    return np.random.default_rng(seed).integers(97, 123, size, dtype=np.uint8).tobytes()


def stored(address: str, **settings: object) -> StoredFile:
    root, key = "s3://tests", address.removeprefix("s3://tests/")
    found = find_object(root, key, cache_settings(settings.get("cache_dir"), settings.get("cache_bytes")))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_limit_is_kept_while_workers_read_more_than_it_holds(bucket: Bucket) -> None:
    texts = {f"{number}.txt": noise(700_000 + 100_000 * number, number) for number in range(16)}
    for name, text in texts.items():
        bucket.put(f"data/{name}", text)
    source = open_documents(f"{bucket.address}/data", cache_bytes=SMALLEST_LIMIT)
    stream = DocumentStream(source, sequence_length=100_000, encode=str.encode, eos_token_id=256, shards=4)
    seen = most = 0
    for batch in StreamLoader(stream, 1, num_workers=2, prefetch_factor=1):
        seen += int(((batch["labels"] >= 0) & (batch["labels"] < 256)).sum())
        with (bucket.cache / ".usage").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nobody writes or removes while this one counts
            most = max(most, bucket.cached_bytes())
    assert seen == sum(map(len, texts.values()))
    assert SMALLEST_LIMIT // 2 < most <= SMALLEST_LIMIT


def test_what_is_evicted_while_it_is_read_comes_again(bucket: Bucket) -> None:
    content = noise(20 * MB + 17)
    file = stored(bucket.put("big.txt", content), cache_bytes=SMALLEST_LIMIT)
    assert file.read(0, len(content)) == content
    assert bucket.cached_bytes() <= SMALLEST_LIMIT
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            bucket.clear_cache()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        chance = np.random.default_rng(1)
        for start in chance.integers(0, len(content), 10).tolist():
            assert file.read(start, start + 3 * MB) == content[start : start + 3 * MB]
    finally:
        over.set()
        thread.join()


def test_of_what_is_larger_than_the_cache_little_is_fetched_for_a_document(bucket: Bucket) -> None:
    content = noise(SMALLEST_LIMIT + MB)
    file = stored(bucket.put("big.jsonl", content), cache_bytes=SMALLEST_LIMIT)
    for start in (5, 3 * MB, len(content) - 9):
        assert file.read(start, start + 9) == content[start : start + 9]
    assert [path.stat().st_size for path in bucket.blocks()] == [SMALL_BLOCK_BYTES] * 3
    assert stored(f"{bucket.address}/big.jsonl").block_bytes == BLOCK_BYTES


def test_a_file_that_is_not_whole_is_never_read(bucket: Bucket) -> None:
    content = noise(3 * MB)
    file = stored(bucket.put("a.txt", content))
    assert file.read(0, len(content)) == content
    blocks = bucket.blocks()
    assert len(blocks) == 3
    for path, size in zip(blocks, (0, 5, BLOCK_BYTES - 1), strict=True):
        os.truncate(path, size)
    assert file.read(0, len(content)) == content
    assert [path.stat().st_size for path in blocks] == [BLOCK_BYTES] * 3


_KILLED = """
import os, signal, sys
from dataloader_dispatch.store.block_cache import BlockCache
with BlockCache(sys.argv[1], 1 << 25).writing("00" * 20, 0, 1 << 20) as handle:
    os.write(handle, b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_leaves_is_removed_when_room_is_needed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.rglob("*.writing-*")
    cache = BlockCache(str(tmp_path), 4 * MB)
    with cache.writing("11" * 20, 0, MB):
        for number in range(8):
            cache.write("22" * 20, number, bytes(MB))
        assert not left.exists()
        assert len(list(tmp_path.rglob("*.writing-*"))) == 1  # that of a writer that lives stays
    assert cache.holds("11" * 20, 0, MB)
    assert not cache.holds("00" * 20, 0, MB)


def test_blocks_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 8 * MB)
    for number in range(8):
        cache.write("ab" * 20, number, bytes(MB))
        os.utime(cache.path("ab" * 20, number), (1000 + number, 1000 + number))
    assert cache.read("ab" * 20, 0, MB, 0, 3) == bytes(3)  # used again, though written first
    cache.write("ab" * 20, 8, bytes(MB))
    assert [number for number in range(9) if cache.holds("ab" * 20, number, MB)] == [0, 2, 3, 4, 5, 6, 7, 8]


def test_without_a_cache_that_can_be_written_everything_is_read_and_said(
    bucket: Bucket,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ordinary_user: Callable[[], AbstractContextManager[None]],
) -> None:
    address = bucket.put("a.jsonl", b"".join(b'{"text": "%d"}\n' % number for number in range(50)))
    (tmp_path / "a file").write_text("")
    source = open_documents(address, cache_dir=tmp_path / "a file" / "cache")
    assert [source[index] for index in range(50)] == [str(number) for number in range(50)]
    assert "cannot be used (Not a directory)" in caplog.text
    caplog.clear()
    (tmp_path / "read-only").mkdir()
    with ordinary_user():
        source = open_documents(address, cache_dir=tmp_path / "read-only")
        assert source[49] == "49"
    assert "cannot be used (Permission denied)" in caplog.text


def test_a_disk_that_is_full_is_said_once_and_data_come_all_the_same(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = noise(3 * MB)
    address = bucket.put("a.txt", content)
    # What another writer holds cannot be evicted, so nothing fits.
    held = BlockCache(str(tmp_path / "held"), SMALLEST_LIMIT)
    (tmp_path / "held").mkdir()
    with held.writing("ff" * 20, 0, SMALLEST_LIMIT):
        file = stored(address, cache_dir=tmp_path / "held", cache_bytes=SMALLEST_LIMIT)
        assert file.read(0, len(content)) == content
        assert file.read(MB, MB + 5) == content[MB : MB + 5]
        with pytest.raises(
            StoreError, match=r"needed as one file, which cannot be written .*Raise cache_bytes"
        ):
            file.local_copy()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["cannot be written" in record.getMessage() for record in warnings] == [True]


def test_an_arrow_file_larger_than_the_limit_is_refused(bucket: Bucket) -> None:
    address = bucket.put("a.arrow", b"ARROW1" + bytes(9 * MB))
    with pytest.raises(StoreError, match=r"needed as one file, .* of at most 8388608 bytes"):
        open_documents(address, cache_bytes=SMALLEST_LIMIT)


_JOB = """
import sys
from dataloader_dispatch import open_documents
source = open_documents(sys.argv[1], cache_bytes=int(sys.argv[2]))
for index in range(len(source)):
    assert len(source[index]) == 500_000 + index, index
print(sum(len(source[index]) for index in range(len(source))))
"""


def test_two_jobs_share_a_cache(bucket: Bucket) -> None:
    for number in range(30):
        bucket.put(f"data/{number:02}.txt", noise(500_000 + number, number))
    words = [sys.executable, "-c", _JOB, f"{bucket.address}/data", str(SMALLEST_LIMIT)]
    jobs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    total = sum(500_000 + number for number in range(30))
    assert [job.communicate(timeout=90)[0].strip() for job in jobs] == [str(total)] * 2
    assert bucket.cached_bytes() <= SMALLEST_LIMIT


def test_the_environment_sets_the_cache(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(9 * MB))
    settings = cache_settings(None, None)
    assert (settings.directory, settings.limit) == (str(bucket.cache), 9 * MB)
    monkeypatch.setenv(LIMIT_VARIABLE, "9GB")
    with pytest.raises(DataError, match=f"{LIMIT_VARIABLE}='9GB' must be a number of bytes"):
        cache_settings(None, None)


def test_what_will_be_read_is_fetched_in_the_background(bucket: Bucket) -> None:
    for number in range(20):
        bucket.put(f"data/{number:02}.txt", noise(1000 + number, number))
    source = open_documents(f"{bucket.address}/data")
    assert bucket.blocks() == []
    assert source.will_read is not None
    source.will_read([3, 4, 7])
    until = time.monotonic() + 30
    while len(bucket.blocks()) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(path.stat().st_size for path in bucket.blocks()) == [1003, 1004, 1007]
    # More than is kept in mind, of which most is forgotten again; what goes wrong says nothing.
    bucket.delete("data/05.txt")
    source.will_read(list(range(20)) * 1000)
    assert [len(str(source[index])) for index in (19, 4, 0)] == [1019, 1004, 1000]
