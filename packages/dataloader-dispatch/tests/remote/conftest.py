"""A real S3 server, and places on it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_bucket import Bucket
from s3_servers import Server, end, start_weed

from dataloader_dispatch.store.reader import DIRECTORY_VARIABLE, end_fetchers
from dist_env import ObjectStore


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server."""
    server, process = start_weed(tmp_path_factory.mktemp("weed"))
    yield server
    end(process)


@pytest.fixture
def bucket_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Server], Bucket]]:
    """Makes a folder on a server, which this process and those it starts are set to use."""

    def make(server: Server) -> Bucket:
        cache = tmp_path / "cache"
        environment = {**server.environment(), DIRECTORY_VARIABLE: str(cache)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        end_fetchers()
        store = ObjectStore("s3://tests", 60.0)
        return Bucket(f"s3://tests/{uuid.uuid4().hex[:12]}", environment, cache, store)

    yield make
    end_fetchers()


@pytest.fixture
def bucket(weed: Server, bucket_on: Callable[[Server], Bucket]) -> Bucket:
    """A new folder on the server."""
    return bucket_on(weed)
