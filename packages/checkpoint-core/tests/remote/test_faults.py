"""What a store may answer: each fault has a sentence that says what to do, and credentials show nowhere."""

import logging
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from s3_proxy import Proxy

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    StoreError,
    find_latest_checkpoint,
)
from checkpoint_core.cli import main
from checkpoint_core.store_path import locate
from dist_env import object_store

SECRETS = ("AKIAWRITER", "secret-of-the-writer", "AKIAREADER", "secret-of-the-reader", "wrong-secret")


def error(code: str, more: str = "") -> str:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{SECRETS[1]}</Message>{more}</Error>'


@pytest.fixture
def gateway(weed, use) -> Iterator[Proxy]:
    found = Proxy(weed.endpoint)
    use({**weed.environment(), "AWS_ENDPOINT_URL": found.address})
    yield found
    found.close()


def manager(url: str, timeout_seconds: float = 6.0) -> CheckpointManager:
    config = CheckpointConfig(url, timeout_seconds=timeout_seconds)
    return CheckpointManager(config, {"model": torch.nn.Linear(300, 300)})


def hidden(text: str) -> str:
    assert not any(secret in text for secret in SECRETS), text
    return text


FAULTS = [
    (403, error("AccessDenied"), "the credentials do not permit it"),
    (403, error("RequestTimeTooSkewed"), "the clock of this machine differs"),
    (403, error("ExpiredToken"), "does not accept the credentials"),
    (
        403,
        error("SignatureDoesNotMatch", f"<AWSAccessKeyId>{SECRETS[0]}</AWSAccessKeyId>"),
        "does not accept the credentials",
    ),
    (400, error("AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"), "Set AWS_REGION=eu-west-1"),
    (301, error("PermanentRedirect"), "the bucket is in another region"),
    (404, error("NoSuchBucket"), "the bucket does not exist"),
    (503, error("SlowDown"), "asks for fewer requests"),
    (507, error("XMinioStorageFull"), "the store is full"),
    (500, error("InternalError"), "the store failed"),
    (418, error("Teapot"), "the store refuses the request (HTTP 418, Teapot)"),
]


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    FAULTS,
    ids=[re.findall("<Code>(.*)</Code>", a)[0] for _, a, _ in FAULTS],
)
def test_each_fault_has_a_sentence(
    gateway: Proxy,
    s3: str,
    use,
    capsys: pytest.CaptureFixture[str],
    caplog,
    status: int,
    answer: str,
    sentence: str,
) -> None:
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.fault = lambda method, path, number: (status, answer)
    caplog.set_level(logging.DEBUG)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        manager(s3).save_checkpoint(1)
    assert sentence in hidden(str(raised.value))
    with pytest.raises(CheckpointError) as raised:
        manager(s3).load_checkpoint()
    assert sentence in hidden(str(raised.value))
    with pytest.raises(StoreError) as refused:
        find_latest_checkpoint(locate(s3, 6.0))
    assert sentence in hidden(str(refused.value))
    assert time.monotonic() - began < 30
    hidden(caplog.text)
    assert capsys.readouterr().err == ""


def test_an_upload_that_fails_says_why_and_leaves_nothing(gateway: Proxy, s3: str, use, keys) -> None:
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.fault = lambda method, path, number: (
        (507, error("XMinioStorageFull")) if method == "PUT" and "model.safetensors" in path else None
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be written.*the store is full"):
        manager(s3).save_checkpoint(1)
    gateway.fault = lambda method, path, number: None
    assert keys(s3) == []


@pytest.mark.parametrize("number", ["1", "3"])
def test_a_part_of_an_upload_that_fails_says_why(gateway: Proxy, s3: str, use, keys, number: str) -> None:
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.fault = lambda method, path, _: (
        (507, error("XMinioStorageFull")) if f"partNumber={number}" in path else None
    )
    place = locate(f"{s3}/large", 6.0)
    pieces = (bytes(1_000_000) for _ in range(60))
    with pytest.raises(StoreError, match=r"large cannot be written.*the store is full"):
        place.store.put_stream(place.key, pieces, 60_000_000)  # type: ignore[attr-defined]
    assert keys(s3) == []


def test_pieces_that_fail_end_an_upload_with_their_own_error(s3: str, keys) -> None:
    place = locate(f"{s3}/large")

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield bytes(1_000_000)
        raise ZeroDivisionError("while the values were copied")

    with pytest.raises(ZeroDivisionError, match="while the values were copied"):
        place.store.put_stream(place.key, pieces(), 60_000_000)  # type: ignore[attr-defined]
    assert keys(s3) == []


def test_throttling_that_ends_is_waited_for(gateway: Proxy, s3: str, use, keys) -> None:
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.fault = lambda method, path, number: (503, error("SlowDown")) if number % 2 else None
    manager(s3, 60.0).save_checkpoint(1)
    loaded = manager(s3, 60.0).load_checkpoint()
    assert loaded is not None
    assert loaded.step == 1


def test_a_store_that_does_not_answer_is_given_up(gateway: Proxy, s3: str, use) -> None:
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.delay_s = 20.0
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no answer in time|cannot be reached"):
        manager(s3, 2.0).load_checkpoint()
    assert time.monotonic() - began < 15


def test_a_commit_whose_answer_is_lost_counts(gateway: Proxy, s3: str, use, weed) -> None:
    """The request arrives, its answer does not; the one that is sent again meets what the first one wrote."""
    use({"AWS_ENDPOINT_URL": gateway.address})
    lost: list[str] = []

    def lose(method: str, path: str, number: int) -> tuple[int, str] | None:
        if method == "PUT" and path.endswith("manifest.json") and not lost:
            lost.append(path)
            return (500, error("InternalError"))
        return None

    gateway.fault = lose
    manager(s3, 60.0).save_checkpoint(1)
    assert lost
    assert str(find_latest_checkpoint(s3)) == f"{s3}/checkpoint-1"


def test_a_commit_without_an_answer_is_not_cleaned_up(gateway: Proxy, s3: str, use, weed) -> None:
    """Nobody knows whether it happened, so nothing is deleted that it may have committed."""
    use({"AWS_ENDPOINT_URL": gateway.address})
    gateway.fault = lambda method, path, number: (
        (500, error("InternalError")) if method == "PUT" and path.endswith("manifest.json") else None
    )
    with pytest.raises(CheckpointError, match="the store failed"):
        manager(s3).save_checkpoint(1)
    gateway.fault = lambda method, path, number: None
    names = [path.name for path in locate(s3).rglob("*")]
    assert "model.safetensors" in names
    assert any(name.startswith(".tmp-checkpoint-1-") for name in names)


def test_an_outage_is_not_taken_for_damage(gateway: Proxy, s3: str, use) -> None:
    """Going back to an older checkpoint because the newest cannot be reached would lose work."""
    use({"AWS_ENDPOINT_URL": gateway.address})
    for step in (1, 2):
        manager(s3, 60.0).save_checkpoint(step) if step == 1 else _resume_and_save(s3, step)
    gateway.fault = lambda method, path, number: (
        (500, error("InternalError")) if "checkpoint-2" in path and method == "GET" else None
    )
    with pytest.raises(CheckpointError, match="the store failed"):
        manager(s3).load_checkpoint()


def test_an_outage_is_not_taken_for_damage_where_memory_has_an_older_one(
    gateway: Proxy, s3: str, use, tmp_path: Path
) -> None:
    def with_memory() -> CheckpointManager:
        config = CheckpointConfig(s3, memory_dir=tmp_path / "memory", timeout_seconds=6.0)
        return CheckpointManager(config, {"model": torch.nn.Linear(3, 3)})

    use({"AWS_ENDPOINT_URL": gateway.address})
    (tmp_path / "memory").mkdir()
    with with_memory() as saving:
        saving.save_to_memory(1)
        saving.save(2)
    with with_memory() as resumed:
        gateway.fault = lambda method, path, number: (403, error("AccessDenied"))
        with pytest.raises(CheckpointError, match="the credentials do not permit it"):
            resumed.load()
        gateway.fault = lambda method, path, number: None
        assert resumed.load().step == 2  # type: ignore[union-attr]


def _resume_and_save(url: str, step: int) -> None:
    resumed = manager(url, 60.0)
    resumed.load_checkpoint()
    resumed.save_checkpoint(step)


def test_credentials_of_the_real_server(weed, use, s3: str, caplog, capsys, keys) -> None:
    caplog.set_level(logging.DEBUG)
    manager(s3).save_checkpoint(1)
    for path in locate(s3).rglob("*"):
        hidden(path.read_bytes().decode("latin-1"))
    use(weed.environment("AKIAWRITER", "wrong-secret"))
    with pytest.raises(CheckpointError, match="does not accept the credentials") as raised:
        manager(s3).load_checkpoint()
    hidden(str(raised.value))
    assert main(["ls", s3]) == 2
    use(weed.environment("AKIAREADER", "secret-of-the-reader"))
    assert manager(s3).load_checkpoint().step == 1  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="the credentials do not permit it") as raised:
        manager(s3).save_checkpoint(2)
    hidden(str(raised.value))
    told = capsys.readouterr()
    hidden(told.out + told.err + caplog.text)
    assert "does not accept the credentials" in told.err


def test_a_server_that_is_not_there(use, weed, s3: str) -> None:
    use({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    with pytest.raises(CheckpointError, match="the store cannot be reached"):
        manager(s3, 4.0).load_checkpoint()


def test_a_profile_needs_what_reads_it(use, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    # Where the benchmarks' peers are installed, it is there.
    monkeypatch.setattr(object_store, "find_spec", lambda name: None if name == "boto3" else find_spec(name))
    use({"AWS_PROFILE": "work"})
    with pytest.raises(CheckpointError, match="AWS_PROFILE=work is read by boto3, which is not installed"):
        manager(s3).load_checkpoint()
