"""What goes wrong between a job, its fetcher and the store: replaced objects, outages, kills, no extra."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_bucket import Bucket
from s3_proxy import Fault, Proxy
from s3_servers import READER_KEY, READER_SECRET, Server, end, start_weed

from dataloader_dispatch import DataError, open_documents
from dataloader_dispatch.store import reader
from dist_env import StoreError

LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(1000))


def fetchers_of(parent: int) -> list[int]:
    """Fetchers that a process started, as the kernel tells."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if b"store.fetcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether processes end within a few seconds."""
    until = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("unreadable", ["stop", "skip"])
def test_an_object_that_is_replaced_or_deleted_is_refused(bucket: Bucket, unreadable: str) -> None:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        bucket.put(f"data/{name}", LINES)
    source = open_documents(f"{bucket.address}/data", unreadable=unreadable)  # type: ignore[arg-type]
    line = source[2]
    bucket.put("data/a.txt", LINES[::-1])  # of the same size
    bucket.delete("data/b.txt")
    bucket.put("data/c.jsonl", LINES.replace(b"document", b"DOCUMENT"))
    assert source[2] == line  # its block is here still, with the content of then
    bucket.clear_cache()
    if unreadable == "skip":
        assert [source[0], source[1], source[2]] == ["", "", ""]
        assert [skipped.documents for skipped in source.skipped.values()] == [1, 1, 1]
        return
    for index, told in ((0, "a.txt was replaced since"), (1, "b.txt does not exist"), (2, "was replaced")):
        with pytest.raises(DataError, match=told):
            source[index]
    assert open_documents(f"{bucket.address}/data")[1] == line.replace("document", "DOCUMENT")


def test_credentials_are_told_of_and_never_shown(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    address = bucket.put("data/a.txt", b"text")
    secret = "a-secret-that-is-not-right"
    for name, value, told in (
        ("AWS_ACCESS_KEY_ID", "AKIANOBODY", "does not accept the credentials"),
        ("AWS_SECRET_ACCESS_KEY", secret, "does not accept the credentials"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1", "cannot be reached"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.setattr(reader, "TIMEOUT_SECONDS", 2.0)
            reader.end_fetchers()
            with pytest.raises(StoreError, match=told) as caught:
                open_documents(address, cache_dir=bucket.cache / name)
            assert not re.search(f"{secret}|secret-of-the-writer|AKIA", str(caught.value))
    reader.end_fetchers()
    with pytest.raises(StoreError, match=r"no-bucket/a cannot be listed: the bucket does not exist"):
        open_documents("s3://no-bucket/a")
    # Reading needs no right to write.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    reader.end_fetchers()
    assert open_documents(address)[0] == "text"


def test_a_fetcher_that_is_killed_is_started_again(bucket: Bucket) -> None:
    source = open_documents(bucket.put("a.jsonl", LINES))
    for _ in range(3):
        (fetcher,) = fetchers_of(os.getpid())
        bucket.clear_cache()
        os.kill(fetcher, signal.SIGKILL)
        assert source[500] == "document 500"
        assert fetchers_of(os.getpid()) != [fetcher]


def test_a_fetcher_that_cannot_run_is_told_of(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_documents(bucket.put("a.jsonl", LINES))
    reader.end_fetchers()
    bucket.clear_cache()
    monkeypatch.setattr(reader, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(StoreError, match=r"ended twice \(killed by SIGKILL\)\. If memory was short"):
        source[500]


@pytest.fixture
def own_weed(tmp_path: Path) -> Iterator[tuple[Server, Callable[[], None], Callable[[], None]]]:
    """A server with functions that kill it and start it again at the same place."""
    folder = tmp_path / "weed"
    folder.mkdir()
    server, process = start_weed(folder)
    running = [process]

    def kill() -> None:
        end(running.pop())

    def restart() -> None:
        words = process.args
        assert isinstance(words, list)
        with (folder / "log").open("ab") as log:
            running.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=folder))

    yield server, kill, restart
    for each in running:
        end(each)


def test_a_server_that_is_killed_and_started_again(
    own_weed: tuple[Server, Callable[[], None], Callable[[], None]],
    bucket_on: Callable[[Server], Bucket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, kill, restart = own_weed
    bucket = bucket_on(server)
    address = bucket.put("a.jsonl", LINES)
    source = open_documents(address)
    bucket.clear_cache()
    kill()
    time.sleep(0.2)
    restart()
    assert source[1] == "document 1"  # the request is repeated until the server is back
    kill()
    bucket.clear_cache()
    monkeypatch.setattr(reader, "TIMEOUT_SECONDS", 2.0)
    with pytest.raises(StoreError, match=r"cannot be listed after \d+ retries: the store cannot be reached"):
        open_documents(address, unreadable="skip")  # an outage is not taken for an unreadable file


def test_a_store_that_throttles_truncates_and_reorders_loses_nothing(
    weed: Server, bucket_on: Callable[[Server], Bucket], tmp_path: Path
) -> None:
    chance = random.Random(1)
    kinds: list[Fault] = ["refuse", "truncate", "late", "lost answer", "close"]

    def fault(method: str, path: str, number: int) -> Fault | None:
        return chance.choice(kinds) if method in ("GET", "HEAD") and chance.random() < 0.4 else None

    for part in range(8):
        (tmp_path / "disk").mkdir(exist_ok=True)
        lines = [json.dumps({"text": f"{part} {number} " + "x" * 3000}) for number in range(500)]
        (tmp_path / "disk" / f"{part}.jsonl").write_text("\n".join(lines))
    proxy = Proxy(weed.endpoint, fault)
    try:
        bucket = bucket_on(Server(proxy.address))
        source = open_documents(bucket.upload(tmp_path / "disk"))
        bucket.clear_cache()
        disk = open_documents(tmp_path / "disk")
        assert [source[index] for index in range(len(disk))] == [disk[index] for index in range(len(disk))]
        assert len(proxy.faults) > 10
        assert len(set(proxy.faults)) > 2
    finally:
        proxy.close()


@pytest.mark.full
def test_an_outage_longer_than_the_library_is_patient(
    weed: Server, bucket_on: Callable[[Server], Bucket]
) -> None:
    ends = [0.0]

    def fault(method: str, path: str, number: int) -> Fault | None:
        return "close" if time.monotonic() < ends[0] else None

    proxy = Proxy(weed.endpoint, fault)
    try:
        bucket = bucket_on(Server(proxy.address))
        source = open_documents(bucket.put("a.jsonl", LINES))
        bucket.clear_cache()
        ends[0] = time.monotonic() + 25  # more than a tenth of the two minutes that others wait for a rank
        assert source[1] == "document 1"
        assert len(proxy.faults) > 1
    finally:
        proxy.close()


_JOB = """
import os, sys, time
os.environ["DATALOADER_DISPATCH_CACHE_DIR"] = "/dev/null/none"  # so that each process has to ask
from dataloader_dispatch import DocumentStream, StreamLoader, open_documents
source = open_documents(sys.argv[1])
stream = DocumentStream(source, sequence_length=8, encode=str.encode, eos_token_id=256)
rows = iter(StreamLoader(stream, 2, num_workers=int(sys.argv[2])))
next(rows)
def below(pid):
    children = open(f"/proc/{pid}/task/{pid}/children").read().split()
    return [int(child) for child in children] + [one for child in children for one in below(child)]
print(*below(os.getpid()), flush=True)
time.sleep(120)
"""


def test_nothing_is_left_of_a_job_that_is_killed(bucket: Bucket) -> None:
    address = bucket.put("a.jsonl", LINES)
    for workers, processes in ((0, 1), (2, 5)):  # a fetcher for the job and for each of its workers
        words = [sys.executable, "-c", _JOB, address, str(workers)]
        job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        below = [int(pid) for pid in job.stdout.readline().split()]
        assert len(below) == processes
        assert all(map(is_running, below))
        job.kill()
        job.wait()
        assert gone(below)


_IN_THREAD = """
import os, sys, threading, time
from dataloader_dispatch import open_documents
found = []
thread = threading.Thread(target=lambda: found.append(open_documents(sys.argv[1])))
thread.start()
thread.join()
time.sleep(0.2)
assert len(found[0][7]) > 0  # the fetcher outlives the thread that started it
print(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().strip(), flush=True)
time.sleep(120)
"""


def test_a_fetcher_that_a_thread_started_lives_as_long_as_its_process(bucket: Bucket) -> None:
    words = [sys.executable, "-c", _IN_THREAD, bucket.put("a.jsonl", LINES)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    below = [int(pid) for pid in job.stdout.readline().split()]
    assert len(below) <= 1
    below += fetchers_of(job.pid)
    job.kill()
    job.wait()
    assert below
    assert gone(below)


def test_ctrl_c_ends_a_job_and_its_fetchers(bucket: Bucket) -> None:
    words = [sys.executable, "-c", _JOB, bucket.put("a.jsonl", LINES), "2"]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert job.stdout is not None
    below = [int(pid) for pid in job.stdout.readline().split()]
    os.killpg(job.pid, signal.SIGINT)
    _, told = job.communicate(timeout=60)
    assert gone(below)
    assert told.count("Traceback") == 1  # that of the job itself
    assert told.rstrip().endswith("KeyboardInterrupt")


_WITHOUT = """
import sys
sys.modules["obstore"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "obstore" else find(name, *more)
from dataloader_dispatch import DataError, open_documents
import dataloader_dispatch.cli.tokenize
print(open_documents(sys.argv[1])[0], open_documents("file://" + sys.argv[1])[0])
try:
    open_documents("s3://bucket/data")
except DataError as error:
    print(error)
"""


def test_without_the_extra_only_addresses_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    words = [sys.executable, "-c", _WITHOUT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    read, told = done.stdout.splitlines()
    assert read == "text text"
    assert told == (
        "s3://bucket is an object store, which needs obstore. Install it with `pip install "
        "'dataloader-dispatch[remote]'`."
    )


def test_the_fetcher_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, dataloader_dispatch.store.fetcher, dist_env; "
        "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
