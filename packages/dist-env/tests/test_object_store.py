"""Addresses of object stores, and processes that may not use them."""

from __future__ import annotations

import errno
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dist_env import (
    ObjectStore,
    StoreError,
    StoreSettingsError,
    may_pass,
    open_object_store,
    split_address,
)

ADDRESSES = {
    "s3://bucket/run": ("s3://bucket", "run"),
    "S3://bucket//a/b/": ("s3://bucket", "a/b"),
    "gs://bucket": ("gs://bucket", ""),
    "file:///a%20b/c": ("file://", "a b/c"),
    "memory://name/x": ("memory://name", "x"),
}
REFUSED = {
    "http://host/x": "addresses that begin with http:// are not supported",
    "s3://key:secret@bucket/x": "Leave out credentials",
    "s3://bucket/x?region=a": "Leave out credentials",
    "s3:///x": "does not name a bucket",
    "file://host/x": "names a host",
    "s3://bucket/a/../b": "has a part",
    " s3://bucket/a": "white space",
    "s3://bucket/a\nb": "cannot be shown",
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_address(text: str) -> None:
    assert split_address(text) == ADDRESSES[text]


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "c:/runs", "s3:/bucket/run"])
def test_path(path: str) -> None:
    assert split_address(path) is None


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(StoreSettingsError, match=REFUSED[text]) as refused:
        split_address(text)
    assert "secret" not in str(refused.value)


def test_forked_process_is_refused_instead_of_waiting_for_ever() -> None:
    store = open_object_store("memory://forked", 10.0)
    store.put("a", b"1")
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            store.get("a")
        except StoreError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        assert "memory://forked cannot be used in this process, which was forked" in told.read()
    os.waitpid(child, 0)
    assert store.get("a") == b"1"


def test_a_range_of_another_content_does_not_come(tmp_path: Path) -> None:
    for root, key in (("memory://ranges", "a b%41/x"), ("file://", f"{tmp_path}/x".lstrip("/"))):
        store = open_object_store(root, 10.0)
        store.put(key, b"0123456789")
        version = store.head(key).version
        assert bytes(store.get_range(key, 2, 5, version)) == b"234"
        assert bytes(store.get_range(key, 8, 99, version)) == b"89"
        store.put(key, b"9876543210 and more")
        assert store.get_range(key, 2, 5, version) is None
        assert bytes(store.get_range(key, 2, 5, store.head(key).version)) == b"765"
        store.delete([key])
        with pytest.raises(FileNotFoundError):
            store.get_range(key, 2, 5, version)


def test_an_error_says_whether_it_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(StoreError, match="cannot be reached") as refused:
        open_object_store("s3://nowhere", 1.0).get("a")
    assert refused.value.may_pass
    assert not StoreError("the credentials do not permit it").may_pass
    assert may_pass(refused.value)
    assert not may_pass(StoreError("the credentials do not permit it"))


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, False),
        (ValueError("wrong"), False),
        (OSError(errno.EACCES, "denied"), False),
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (caused(ValueError("wrong"), OSError(errno.EIO, "broken")), True),
        (caused(ValueError("wrong"), caused(KeyError("a"), FileNotFoundError(2, "gone"))), False),
    ],
    ids=repr,
)
def test_what_other_input_would_not_change_may_pass(error: Exception | None, expected: bool) -> None:
    assert may_pass(error) is expected


def test_an_error_in_its_own_context_is_looked_at_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert not may_pass(first)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9000", "http://user:secret@host", "http://host?x=1", "ftp://host", "http://"]
)
def test_endpoint_that_is_not_one(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(
        StoreSettingsError, match="AWS_ENDPOINT_URL is not the address of a server"
    ) as refused:
        ObjectStore("s3://bucket", 4.0)
    assert "secret" not in str(refused.value)


def test_server_that_comes_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the library tries by itself, which is two seconds or so where connections are refused."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.send_header("ETag", '"a"')
            self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *arguments: object) -> None:
            return

    # Its port is taken from here on, so that no other program answers there.
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
    server.server_bind()

    def begin() -> None:
        until = time.monotonic() + 60
        while "it is tried again, for 60 s at most" not in caplog.text and time.monotonic() < until:
            time.sleep(0.05)
        server.server_activate()
        server.serve_forever()

    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    beginning = threading.Thread(target=begin)
    beginning.start()
    try:
        assert ObjectStore("s3://bucket", 600.0).get("a") == b"here"
    finally:
        server.shutdown()
        beginning.join()
        server.server_close()
    assert "it is tried again, for 60 s at most" in caplog.text


class _Empty(BaseHTTPRequestHandler):
    """Azure's blob service, as far as it says that something does not exist."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("x-ms-error-code", "BlobNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_an_emulator_of_azure_is_asked_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_address[1]}/account"
    for name, value in {"ENDPOINT": host, "ACCOUNT_NAME": "account", "ACCOUNT_KEY": "a2V5"}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    with pytest.raises(FileNotFoundError):
        ObjectStore("az://container", 10.0).head("a")
    server.shutdown()
    server.server_close()
