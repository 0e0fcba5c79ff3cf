"""Addresses of object stores, and processes that may not use them."""

from __future__ import annotations

import os

import pytest

from dist_env import StoreError, StoreSettingsError, open_object_store, split_address

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
