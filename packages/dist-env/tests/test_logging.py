"""Loggers in one process; those of several ranks are in test_together.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from dist_env import DistributedEnvironment, get_logger
from dist_env.logging import set_speaker


@pytest.fixture
def speak_as_rank_3() -> Iterator[None]:
    before = set_speaker(3, 4, logging.INFO)
    yield
    set_speaker(*before)


def test_other_ranks_speak_from_warning_on(speak_as_rank_3: None, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("test.other_ranks")
    logger.info("not heard")
    logger.warning("heard %d times", 1)
    logger.warning("heard %d times", 1)
    logger.warning("heard %d times", 2)
    logger.error("an error")
    logger.error("an error")
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition("] ")[2] for text in texts] == [
        "heard 1 times",
        "heard 2 times",
        "an error",
        "an error",
    ]
    assert all(text.startswith("[rank 3 ") for text in texts)


def test_rank_from_the_launcher_before_an_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    get_logger("test.before").info("not heard")
    assert caplog.text == ""


def test_level_of_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("test.level")
    own = get_logger("test.own_level")
    own.setLevel(logging.DEBUG)
    with DistributedEnvironment(log_level="ERROR", always=False):
        logger.warning("not heard")
        own.debug("heard")
    logger.info("heard again")
    assert [record.getMessage() for record in caplog.records] == ["heard", "heard again"]


def test_without_handlers_it_goes_to_standard_error_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    get_logger("test_parent")
    get_logger("test_parent.child").info("said")
    assert capsys.readouterr().err == "INFO test_parent.child: said\n"
    assert get_logger("test_parent") is logging.getLogger("test_parent")
