"""What some pages need around their code."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def _s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    from s3_servers import end, start_weed

    server, process = start_weed(tmp_path_factory.mktemp("s3"))
    yield server.environment()
    end(process)


@pytest.fixture(autouse=True)
def _stores_of_the_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on object storage finds a real S3 server in its environment, as a cluster would have it."""
    if Path(str(request.node.path)).name == "object-storage.md":
        for name, value in request.getfixturevalue("_s3_server").items():
            monkeypatch.setenv(name, value)
        cache = request.getfixturevalue("tmp_path_factory").mktemp("cache")
        monkeypatch.setenv("DATALOADER_DISPATCH_CACHE_DIR", str(cache))


@pytest.fixture(autouse=True)
def _temporary_directories_of_the_page(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a page leaves in new temporary directories goes when pytest removes its own."""
    place = str(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(tempfile, "tempdir", place)
    monkeypatch.setenv("TMPDIR", place)
